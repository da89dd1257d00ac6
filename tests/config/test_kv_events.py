"""kv_events_config: vLLM's keys and defaults, everything else refused by name."""

from typing import Any

import pytest

from moestro.config import EngineConfig
from moestro.config.kv_events import KVEventsConfig
from moestro.errors import ConfigError


def test_defaults_are_vllms() -> None:
    config = EngineConfig().kv_events
    assert config == KVEventsConfig()
    assert (config.endpoint, config.buffer_steps, config.hwm) == ("tcp://*:5557", 10_000, 100_000)
    assert not config.publishes


def test_publishing_is_asked_for() -> None:
    on = EngineConfig.from_kwargs(kv_events_config='{"enable_kv_cache_events": true}').kv_events
    assert on.publishes
    nowhere = {"enable_kv_cache_events": True, "publisher": "null"}
    assert not EngineConfig(kv_events_config=nowhere).kv_events.publishes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable": True}, "no key 'enable'; its keys are enable_kv_cache_events"),
        ({"enable_kv_cache_events": "yes"}, "must be true or false, got 'yes'"),
        ({"publisher": "kafka"}, "publisher must be zmq or null, got 'kafka'"),
        ({"endpoint": 5557}, "endpoint must be an address"),
        ({"endpoint": "5557"}, "endpoint must be an address"),
        ({"endpoint": None}, "endpoint must be an address"),
        ({"replay_endpoint": "http://x"}, "replay_endpoint must be an address"),
        ({"buffer_steps": 0}, r"buffer_steps must be a whole number in \[1, 10000000\], got 0"),
        ({"hwm": True}, "hwm must be a whole number"),
        ({"max_queue_size": 1.5}, "max_queue_size must be a whole number"),
        ({"topic": 5}, "topic must be text"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(kv_events_config=options)


def test_there_is_nothing_to_tell_without_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="nothing to tell with enable_prefix_caching false"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
