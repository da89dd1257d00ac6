"""What the user wants: options from Python, YAML and flags, defined once."""

from moestro.config.engine import EngineConfig
from moestro.config.flags import (
    add_engine_flags,
    add_server_flags,
    engine_config_from_args,
    server_config_from_args,
)
from moestro.config.server import ServerConfig

__all__ = [
    "EngineConfig",
    "ServerConfig",
    "add_engine_flags",
    "add_server_flags",
    "engine_config_from_args",
    "server_config_from_args",
]
