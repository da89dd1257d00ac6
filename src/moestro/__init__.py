"""Moestro: an inference engine for long-context sparse-MoE language models."""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestro.config import EngineConfig
    from moestro.core.outputs import RequestOutput
    from moestro.core.sampling_params import SamplingParams
    from moestro.engine.async_engine import AsyncEngine
    from moestro.engine.llm import LLM

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "moestro.engine.llm",
    "AsyncEngine": "moestro.engine.async_engine",
    "EngineConfig": "moestro.config",
    "RequestOutput": "moestro.core.outputs",
    "SamplingParams": "moestro.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import moestro` costs nothing."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'moestro' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    try:
        return metadata.version("moestro")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0.0.0+source"
