"""KV events as a subscriber with vLLM's schema reads them, from real sockets."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq

from moestro.config.kv_events import KVEventsConfig
from moestro.core.kv_events import KVEvent, PagesRemoved, PagesStored
from moestro.engine.kv_event_publisher import END_OF_REPLAY, KVEventPublisher
from moestro.errors import ConfigError


# What subscribers of vLLM 0.32 declare, field by field and in this order.
class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode
FIRST, SECOND = bytes(range(16)), bytes(range(16, 32))
STORED = PagesStored((FIRST, SECOND), None, tuple(range(8)), 4, "device", "salt", "s")
CHILD = PagesStored((b"\xff" * 16,), SECOND, (8, 9, 10, 11), 4, "host")
GONE = PagesRemoved((FIRST,), "store")


Numbered = tuple[int, KVEventBatch]


class Sockets:
    """Sockets of one test, each closed at its end."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._opened: list[Any] = []

    def open(self, kind: int) -> Any:
        made = self.context.socket(kind)
        made.setsockopt(zmq.RCVTIMEO, 20_000)
        self._opened.append(made)
        return made


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.context.destroy(linger=0)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/pub",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv",
    )


def subscriber(sockets: Sockets, config: KVEventsConfig) -> Any:
    made = sockets.open(zmq.SUB)
    made.subscribe(config.topic)
    made.connect(config.endpoint)
    return made


def replayed(sockets: Sockets, config: KVEventsConfig, first: int) -> list[Numbered]:
    """What the replay socket gives from a sequence number on: many answers to one request."""
    asking = sockets.open(zmq.DEALER)
    asking.connect(config.replay_endpoint)
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        _, number, payload = asking.recv_multipart()
        if not payload:
            assert number == END_OF_REPLAY
            return found
        found.append((int.from_bytes(number, "big"), decode(payload)))


def next_of(listening: Any) -> tuple[int, KVEventBatch]:
    topic, number, payload = listening.recv_multipart()
    assert topic == b"kv"
    return int.from_bytes(number, "big"), decode(payload)


def publish_until_heard(
    publisher: KVEventPublisher, listening: Any, events: list[KVEvent]
) -> tuple[int, KVEventBatch]:
    """A subscription takes effect some time after it was made."""
    for _ in range(1000):
        publisher.publish(events)
        if listening.poll(20):
            return next_of(listening)
    raise AssertionError("nothing was heard")


def test_a_subscriber_hears_vllms_format(sockets: Sockets, config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    before = time.time()
    number, batch = publish_until_heard(
        publisher, subscriber(sockets, config), [STORED, CHILD, GONE]
    )
    publisher.close()
    assert number >= 1  # 0 said that everything is cleared
    assert before - 1 <= batch.ts <= time.time()
    assert batch.data_parallel_rank == 0
    low = [int.from_bytes(h[8:], "big") for h in (FIRST, SECOND)]
    assert batch.events == [
        BlockStored(
            low, None, list(range(8)), 4, None, "GPU", None, [("salt",), None], session_id="s"
        ),
        BlockStored([2**64 - 1], low[1], [8, 9, 10, 11], 4, None, "CPU", None, [None]),
        BlockRemoved(low[:1], "STORAGE"),
    ]


def test_events_are_maps_with_their_type_first(sockets: Sockets, config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    listening = subscriber(sockets, config)
    publish_until_heard(publisher, listening, [STORED, GONE])
    publisher.publish([STORED, GONE])
    _, _, payload = listening.recv_multipart()
    publisher.close()
    _, events, _ = msgspec.msgpack.decode(payload)
    assert [next(iter(event.items())) for event in events] == [
        ("type", "BlockStored"),
        ("type", "BlockRemoved"),
    ]


def test_missed_batches_can_be_had_again(sockets: Sockets, config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    for _ in range(5):
        publisher.publish([GONE])
    wait_for(lambda: publisher.counts()[0] == 6)
    everything = replayed(sockets, config, 0)
    assert [number for number, _ in everything] == [0, 1, 2, 3, 4, 5]
    assert everything[0][1].events == [AllBlocksCleared()]
    assert all(
        b.events == [BlockRemoved([0x08090A0B0C0D0E0F], "STORAGE")] for _, b in everything[1:]
    )
    assert [number for number, _ in replayed(sockets, config, 4)] == [4, 5]
    assert replayed(sockets, config, 99) == []
    publisher.close()


def test_only_the_newest_batches_are_kept(sockets: Sockets, config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(replace(config, buffer_steps=3))
    for _ in range(9):
        publisher.publish([GONE])
    wait_for(lambda: publisher.counts()[0] == 10)
    assert [number for number, _ in replayed(sockets, config, 0)] == [7, 8, 9]
    publisher.close()


def wait_for(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


def test_nonsense_on_the_replay_socket_is_ignored(sockets: Sockets, config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    rude = sockets.open(zmq.DEALER)
    rude.connect(config.replay_endpoint)
    for frames in ([b"hello"], [b"", b"123"], [b"", b"1" * 8, b"more"], [b"", b"1" * 9]):
        rude.send_multipart(frames)
    assert [number for number, _ in replayed(sockets, config, 0)] == [0]
    publisher.close()


def test_what_does_not_fit_is_dropped_counted_and_leaves_a_gap(
    sockets: Sockets, config: KVEventsConfig
) -> None:
    publisher = KVEventPublisher(replace(config, buffer_steps=3, max_queue_size=4))
    wait_for(lambda: publisher.counts()[0] == 1)
    sender = publisher._sender
    held, go_on = threading.Event(), threading.Event()
    encode = sender._encode

    def slow(batch: object) -> bytes:
        held.set()
        assert go_on.wait(60)
        return cast(bytes, encode(batch))

    sender._encode = slow
    publisher.publish([GONE])  # 1 is being sent
    assert held.wait(60)
    began = time.monotonic()
    for _ in range(10):  # 2 to 5 wait, 6 to 11 don't fit
        publisher.publish([GONE])
    assert time.monotonic() - began < 30  # it did not wait for the sender
    assert publisher.counts() == (1, 6)
    go_on.set()
    wait_for(lambda: publisher.counts()[0] == 6)
    publisher.publish([GONE])
    wait_for(lambda: publisher.counts()[0] == 7)
    assert [number for number, _ in replayed(sockets, config, 0)] == [4, 5, 12]
    publisher.close()


def test_closing_sends_what_waits_and_lets_the_address_go(
    sockets: Sockets, config: KVEventsConfig
) -> None:
    publisher = KVEventPublisher(config)
    listening = subscriber(sockets, config)
    last, _ = publish_until_heard(publisher, listening, [GONE])
    publisher.publish([STORED])
    publisher.close()
    publisher.close()
    publisher.publish([GONE])  # to nobody
    while True:
        number, batch = next_of(listening)
        if isinstance(batch.events[0], BlockStored):
            break
    assert number > last
    KVEventPublisher(config).close()


def test_a_dropped_publisher_closes_by_itself(config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    thread = next(t for t in threading.enumerate() if t.name == "moestro-kv-events")
    del publisher
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_an_address_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint=address
        )
        with pytest.raises(ConfigError, match=r"replay_endpoint=.* can't be used .*in use"):
            KVEventPublisher(config)


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="endpoint=tcp://nowhere can't be used"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://nowhere"))
