"""KVEventsConfig: what kv_events_config may hold, under vLLM's names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moestro.errors import ConfigError, shown

_SCHEMES = ("tcp://", "ipc://")
_PUBLISHERS = ("zmq", "null")
_MOST = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where KV events go. Raises ConfigError for a wrong value.

    publisher: zmq or null; None is zmq once events are enabled. endpoint: a PUB socket, bound
    where it holds a wildcard (`tcp://*:5557`) or is ipc, else connected.
    replay_endpoint: a ROUTER socket from which the last buffer_steps batches can be had again.
    hwm: batches that wait for one slow subscriber. max_queue_size: batches that wait to be sent.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _wrong("enable_kv_cache_events", "true or false", self.enable_kv_cache_events)
        if self.publisher is not None and self.publisher not in _PUBLISHERS:
            raise _wrong("publisher", " or ".join(_PUBLISHERS), self.publisher)
        if not isinstance(self.topic, str):
            raise _wrong("topic", "text", self.topic)
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is None and name == "replay_endpoint":
                continue
            if not isinstance(address, str) or not address.startswith(_SCHEMES):
                raise _wrong(name, "an address such as tcp://*:5557", address)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
                raise _wrong(name, f"a whole number in [1, {_MOST}]", count)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> "KVEventsConfig":
        """None is all defaults. Raises ConfigError, also for a key that there is not."""
        given = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"kv_events_config has no key {shown(name)}; its keys are {', '.join(known)}."
                )
        return cls(**given)

    @property
    def publishes(self) -> bool:
        """Whether events leave the process."""
        return self.enable_kv_cache_events and self.publisher != "null"


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"kv_events_config: {name} must be {expected}, got {shown(got)}.")
