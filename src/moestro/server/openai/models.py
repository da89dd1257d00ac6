"""GET /v1/models and /v1/models/{name}."""

from typing import Any

from fastapi import Request
from pydantic import BaseModel

from moestro.server.engine_client import ServedModel, ServerContext
from moestro.server.openai.fields import check_model


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "moestro"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


async def list_models(request: Request) -> ModelList:
    """Every name the model is served under, the one shown first."""
    context: ServerContext = request.app.state.context
    return ModelList(data=[_card(name, context.model) for name in context.model.names])


async def show_model(model_name: str, request: Request) -> ModelCard:
    """One of them; 404 for another name."""
    context: ServerContext = request.app.state.context
    check_model(model_name, context.model.names)
    return _card(model_name, context.model)


def _card(name: str, model: ServedModel) -> ModelCard:
    return ModelCard(
        id=name, created=model.created, root=model.root, max_model_len=model.max_model_len
    )
