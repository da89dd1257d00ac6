"""The application: routes, error handlers, the API's description."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from moestro.core.kv_hints import HintAction
from moestro.errors import MoestroError
from moestro.server import kv_routes, probes
from moestro.server.engine_client import ServerContext
from moestro.server.errors import (
    ApiError,
    ClientGoneError,
    on_api_error,
    on_client_gone,
    on_http_exception,
    on_unexpected,
)
from moestro.server.middleware import RequestLabels
from moestro.server.openai import models
from moestro.server.openai.chat import create_chat_completion
from moestro.server.openai.chat_protocol import ChatCompletion, ChatCompletionRequest
from moestro.server.openai.completion_protocol import Completion, CompletionRequest
from moestro.server.openai.completions import create_completion
from moestro.server.running_calls import RunningCalls

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    *kv_routes.REQUEST_MODELS,
)
_REF = "#/components/schemas/{model}"


def create_app(context: ServerContext, lifespan: Lifespan | None = None) -> FastAPI:
    """An application around one engine. `lifespan` runs around its life in the server."""
    # The interactive pages would load their scripts from a CDN; /openapi.json stays.
    app = FastAPI(
        title="Moestro",
        version=context.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    app.state.calls = RunningCalls(context.metrics.observe_disconnect)
    _add_routes(app)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(MoestroError, on_api_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(Exception, on_unexpected)
    app.add_middleware(RequestLabels, metrics=context.metrics)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI) -> None:
    posted: list[tuple[str, Any, type[BaseModel], type[BaseModel] | None]] = [
        ("/v1/chat/completions", create_chat_completion, ChatCompletionRequest, ChatCompletion),
        ("/v1/completions", create_completion, CompletionRequest, Completion),
        ("/v1/kv/explain", kv_routes.explain, kv_routes.PrefixBody, None),
    ]
    posted += [
        (f"/v1/kv/{action}", kv_routes.handler_of(action), kv_routes.HintBody, None)
        for action in HintAction
    ]
    for path, handler, request_model, response_model in posted:
        schema = {"$ref": _REF.format(model=request_model.__name__)}
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=response_model,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            },
        )
    app.add_api_route("/v1/models", models.list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_name:path}", models.show_model, methods=["GET"])
    app.add_api_route("/health", probes.health, methods=["GET"])
    app.add_api_route("/metrics", probes.metrics, methods=["GET"])
    app.add_api_route("/version", probes.version, methods=["GET"])


def _describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI, with the schemas of bodies that the routes read themselves."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in REQUEST_MODELS], ref_template=_REF
        )
        components = described.setdefault("components", {}).setdefault("schemas", {})
        components.update(schemas.get("$defs", {}))
        app.openapi_schema = described
    return app.openapi_schema
