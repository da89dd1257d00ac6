"""Around every route: a request id, and a count of what was answered."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.metrics import ServerMetrics
from moestro.server.errors import CLIENT_CLOSED_REQUEST

logger = logging.getLogger(__name__)

QUIET_ROUTES = ("/health", "/metrics")
"""Asked for every few seconds by machines: logged at debug level only."""
REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestLabels:
    """Gives each request an id (the client's X-Request-Id if it is usable) and counts answers.

    The id is put into the scope as `request_id` and into the response's headers. Metrics and log
    lines hold the declared route, so that made-up paths can neither grow nor forge them.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        status = CLIENT_CLOSED_REQUEST

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, labelled)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            method = scope["method"] if route is not None else "other"
            self._metrics.observe_http(path, method, status)
            level = logging.DEBUG if path in QUIET_ROUTES else logging.INFO
            client = scope["client"][0] if scope.get("client") else "-"
            logger.log(level, "%s %s %s %d %s", client, method, path, status, request_id)
