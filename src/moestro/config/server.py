"""ServerConfig: options of `moestro serve` that the engine does not know."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from moestro.config.kinds import Choice, Integer, Seconds, Switch, Text, Words
from moestro.config.knob import check_fields, knob
from moestro.config.sources import own_options
from moestro.envs import LOG_LEVELS

_server = partial(knob, group="Server")
_later = partial(knob, group="Server", waits_for="the full server")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how the HTTP server answers. Raises ConfigError for a wrong value."""

    host: str = _server("127.0.0.1", Text("an address"), "Address to listen on.")
    port: int = _server(
        8000, Integer(0, 65535), "Port to listen on; 0 takes a free one and says which."
    )
    served_model_name: tuple[str, ...] = _server(
        (),
        Words(),
        "Names the API knows the model by; the first is the one shown. Default: the model's.",
    )
    log_level: str | None = _server(
        None,
        Choice(LOG_LEVELS),
        "Least severe log lines shown. Default: MOESTRO_LOG_LEVEL.",
        also=("uvicorn_log_level",),
    )
    shutdown_timeout: float = _server(
        30.0,
        Seconds(),
        "Seconds that running requests get to finish after SIGINT or SIGTERM.",
    )
    api_key: str | None = _later(None, Text("a key"), "Key that clients must send.")
    tool_call_parser: str | None = _later(
        None, Text("a parser"), "How tool calls are read from the model's text."
    )
    reasoning_parser: str | None = _later(
        None, Text("a parser"), "How reasoning is read from the model's text."
    )
    enable_auto_tool_choice: bool = _later(False, Switch(), "Let the model choose to call tools.")
    max_num_queued_reqs: int | None = _later(
        None, Integer(1, 2**31 - 1), "Requests that may wait before more are turned away."
    )
    enable_per_request_metrics: bool = _server(
        False, Switch(), "Report timing with each answer, not only where include_timing asks."
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_kwargs(cls, **options: Any) -> "ServerConfig":
        """From Python keywords; None means the default. Raises ConfigError."""
        return cls(**own_options(cls, options))
