"""Routes for operators: /health, /metrics, /version."""

from fastapi import Request
from starlette.responses import Response

from moestro.metrics import CONTENT_TYPE
from moestro.server.engine_client import ServerContext


async def health(request: Request) -> Response:
    """200 and nothing while the engine lives, 503 once it has died."""
    context: ServerContext = request.app.state.context
    return Response(status_code=503 if context.engine.is_dead else 200)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    context: ServerContext = request.app.state.context
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)


async def version(request: Request) -> dict[str, str]:
    """The version of the package."""
    context: ServerContext = request.app.state.context
    return {"version": context.version}
