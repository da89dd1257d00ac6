"""KV events over ZeroMQ in the format of vLLM 0.32 (vllm/distributed/kv_events.py).

A message is (topic, sequence number as 8 bytes big-endian, payload). A payload is msgpack:
[Unix time, [events], data parallel rank], an event a map whose `type` is BlockStored, BlockRemoved
or AllBlocksCleared. Block hashes are the low 64 bits of page hashes, as vLLM's are by default. The
replay socket answers a sequence number with every kept batch from there on and an end marker.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from moestro.config.kv_events import KVEventsConfig
from moestro.core.kv_events import KVEvent, PagesRemoved, PagesStored
from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIA = {"device": "GPU", "host": "CPU", "store": "STORAGE"}
"""What vLLM calls the tiers, whatever the device is."""

_LINGER_MS = 1000
_JOIN_TIMEOUT_S = 2.0
_HASH_MASK = (1 << 64) - 1
_Batch = tuple[int, float, list[dict[str, Any]]]


def event_maps(events: Sequence[KVEvent]) -> list[dict[str, Any]]:
    """Events as vLLM's subscribers know them; `type` first."""
    return [_stored(e) if isinstance(e, PagesStored) else _removed(e) for e in events]


def _stored(event: PagesStored) -> dict[str, Any]:
    parent = event.parent_hash
    return {
        "type": "BlockStored",
        "block_hashes": [_int_hash(h) for h in event.page_hashes],
        "parent_block_hash": None if parent is None else _int_hash(parent),
        "token_ids": list(event.token_ids),
        "block_size": event.page_size,
        "lora_id": None,
        "medium": MEDIA[event.medium],
        "lora_name": None,
        "extra_keys": [_extra_keys(event), *[None] * (len(event.page_hashes) - 1)],
        "session_id": event.session_id,
    }


def _extra_keys(event: PagesStored) -> list[str] | None:
    """What beside its tokens names the first page: the salt, which no later page has of its own."""
    return [event.cache_salt] if event.cache_salt else None


def _removed(event: PagesRemoved) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [_int_hash(h) for h in event.page_hashes],
        "medium": MEDIA[event.medium],
    }


def _int_hash(page_hash: bytes) -> int:
    return int.from_bytes(page_hash, "big") & _HASH_MASK


class KVEventPublisher:
    """Publishes on a thread of its own; publish never waits for anything.

    The first batch says that all blocks are cleared: what a subscriber knew of this address was
    another process. A batch that finds max_queue_size others waiting is dropped and counted; its
    sequence number stays unused, so that subscribers see the gap. One that is no longer
    referenced closes by itself.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Raises ConfigError when an address can't be had or the extra `events` is missing."""
        sender = _Sender(config, rank)
        sender.put([{"type": "AllBlocksCleared"}])
        thread = threading.Thread(target=sender.run, name="moestro-kv-events", daemon=True)
        thread.start()
        self._sender = sender
        self._stop = weakref.finalize(self, _stop, sender, thread)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Take a batch. Never blocks."""
        if events:
            self._sender.put(event_maps(events))

    def counts(self) -> tuple[int, int]:
        """Batches published and dropped so far."""
        return self._sender.num_published, self._sender.num_dropped

    def close(self) -> None:
        """Send what waits, for at most a second or two, and close the sockets. Repeatable."""
        self._stop()


class _Sender:
    """What the thread works on; it knows nothing of the publisher, which may be dropped."""

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                "kv_events_config needs the extra `events` (pip install 'moestro[events]'): "
                f"{error}."
            ) from None
        self.num_published = 0
        self.num_dropped = 0
        self._zmq = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._rank = rank
        self._max_waiting = config.max_queue_size
        self._lock = threading.Lock()
        self._waiting: deque[_Batch] = deque()
        self._next_seq = 0
        self._closing = False
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub: Any = None
        self._replay: Any = None
        try:
            self._open_sockets(config)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake_reader, self._wake_writer = os.pipe()

    def put(self, events: list[dict[str, Any]]) -> None:
        """Queue a batch, or drop it. From any thread."""
        with self._lock:
            if self._closing:
                return
            seq = self._next_seq
            self._next_seq += 1
            if len(self._waiting) >= self._max_waiting:
                self.num_dropped += 1
                return
            self._waiting.append((seq, time.time(), events))
            if len(self._waiting) == 1:  # so the pipe never holds more than a few bytes
                os.write(self._wake_writer, b"x")

    def stop(self) -> None:
        """Send what waits and end. From any thread."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.write(self._wake_writer, b"x")

    def run(self) -> None:
        """Send and answer until stopped; then let go of everything."""
        poller = self._zmq.Poller()
        poller.register(self._wake_reader, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while self._serve(dict(poller.poll())):
                pass
        except Exception:
            logger.exception("publishing KV events has ended")
        finally:
            with self._lock:
                self._closing = True
            self._context.destroy(linger=_LINGER_MS)
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _open_sockets(self, config: KVEventsConfig) -> None:
        self._pub = self._context.socket(self._zmq.PUB)
        self._pub.set_hwm(config.hwm)
        address = config.endpoint
        is_bound = "*" in address or "::" in address or address.startswith("ipc://")
        self._attach(self._pub.bind if is_bound else self._pub.connect, "endpoint", address)
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(self._zmq.ROUTER)
            # all of a replay fits the queue of a client that reads slowly: beyond it is dropped
            self._replay.set_hwm(config.buffer_steps + 1)
            self._attach(self._replay.bind, "replay_endpoint", config.replay_endpoint)

    def _attach(self, to: Callable[[str], object], name: str, address: str) -> None:
        try:
            to(address)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}={address} can't be used ({error}). Is another server "
                "listening there? Give another address."
            ) from None

    def _serve(self, ready: dict[Any, int]) -> bool:
        """Do what there is to do; False once everything is sent and nothing more comes."""
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        closing = self._send_waiting()
        if self._replay is not None and self._replay in ready:
            self._answer_replay()
        return not closing

    def _send_waiting(self) -> bool:
        """Whether nothing can come any more."""
        while True:
            with self._lock:
                if not self._waiting:
                    return self._closing
                seq, time_s, events = self._waiting.popleft()
            payload = self._encode([time_s, events, self._rank])
            number = seq.to_bytes(8, "big")
            self._pub.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
            self.num_published += 1

    def _answer_replay(self) -> None:
        """Answer one request: (client, empty, first sequence number), as a DEALER sends it."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.debug("not a replay request: %d frames", len(frames))
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:  # big-endian numbers of one length compare as bytes
                self._replay.send_multipart((client, b"", number, payload))
        self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _stop(sender: _Sender, thread: threading.Thread) -> None:
    sender.stop()
    if thread is not threading.current_thread():
        thread.join(_JOIN_TIMEOUT_S)
