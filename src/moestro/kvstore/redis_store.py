"""Pages in a Redis or Valkey server that several machines may share.

A page is one string under moestro:kv:2:<namespace digest>:<page hash> (hexadecimal). How much is
kept, and what goes first, is the server's business: set maxmemory and maxmemory-policy
allkeys-lru there. Without a policy a full server refuses pages, which is counted and harmless.
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, unquote

import redis
from redis import exceptions as errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.errors import ConfigError
from moestro.kvstore.backend import KEY_BYTES, Deadline, Namespace, runs
from moestro.kvstore.codec import DIGEST_BYTES, Value, join, split
from moestro.kvstore.store_url import database

logger = logging.getLogger(__name__)

PREFIX = b"moestro:kv:2:"
DEFAULT_PORT = 6379
# Pages a round trip: enough to hide it, few enough to notice a deadline in between.
PAGES_A_TRIP = 8
KEYS_A_TRIP = 1024


class RedisStore:
    """A BlockingStore. A server that can't be reached now is tried again at each call; one that
    doesn't take the password is a ConfigError."""

    capacity_bytes = 0
    num_evicted = 0

    def __init__(self, parts: SplitResult, timeout_s: float) -> None:
        self._secrets = _secrets(parts)
        self._where = f"{parts.hostname or 'localhost'}:{parts.port or DEFAULT_PORT}"
        self._client = redis.Redis(
            host=parts.hostname or "localhost",
            port=parts.port or DEFAULT_PORT,
            db=database(parts),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # whether to try again is the circuit breaker's decision
            health_check_interval=0,
            protocol=2,
        )
        refusal = None
        try:
            with self._translated():
                self._client.ping()
        except StoreError as error:
            if isinstance(error.__cause__, (errors.AuthenticationError, errors.ResponseError)):
                refusal = error.__cause__
            else:
                logger.warning("%s; tried again when pages are asked for", error)
        if refusal is not None:
            self._client.close()
            raise ConfigError(
                f"Redis at {self._where} refuses: {refusal}. A password belongs into the URL, "
                "and the number of a database that is there: redis://USER:PASSWORD@HOST:PORT/DB."
            )

    def get_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[Value | None]:
        """See BlockingStore."""
        found: list[Value | None] = []
        for some in runs(keys, PAGES_A_TRIP):
            deadline.check()
            with self._translated():
                answer = self._client.mget([_name(key) for key in some])
            if not isinstance(answer, list) or len(answer) != len(some):
                raise self._nonsense(answer)
            for value in answer:
                if value is not None and not isinstance(value, bytes):
                    raise self._nonsense(value)
                found.append(None if value is None else split(value))
        return found

    def put_many(self, values: Sequence[tuple[bytes, Value]], deadline: Deadline) -> int:
        """See BlockingStore."""
        there = self.exists_many([key for key, _ in values], deadline)
        num_stored = 0
        for some in runs(zip(values, there, strict=True), PAGES_A_TRIP):
            absent = [(key, join(value)) for (key, value), is_there in some if not is_there]
            deadline.check()  # after the copying: what is sent is what was to be stored
            with self._translated():
                pipeline = self._client.pipeline(transaction=False)
                for key, blob in absent:
                    pipeline.set(_name(key), blob)
                answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, errors.OutOfMemoryError):
                    return num_stored
                if answer is not True:
                    raise self._nonsense(answer)
                num_stored += 1
            num_stored += len(some) - len(absent)
        return num_stored

    def exists_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """See BlockingStore."""
        return [answer == 1 for answer in self._each("exists", keys, deadline)]

    def delete(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See BlockingStore."""
        return sum(self._each("unlink", keys, deadline))

    def _each(self, command: str, keys: Sequence[bytes], deadline: Deadline) -> list[int]:
        """One command for every key; its answers are numbers."""
        answers: list[int] = []
        for some in runs(keys, KEYS_A_TRIP):
            deadline.check()
            with self._translated():
                pipeline = self._client.pipeline(transaction=False)
                for key in some:
                    pipeline.execute_command(command, _name(key))
                answers += pipeline.execute()
        for answer in answers:
            if not isinstance(answer, int):
                raise self._nonsense(answer)
        return answers

    def scan(self, prefix: bytes) -> Iterator[bytes]:
        """See BlockingStore."""
        pattern = PREFIX + (prefix.hex().encode() + b":*" if prefix else b"*")
        seen = set()
        cursor = 0
        while True:
            with self._translated():
                cursor, names = self._client.scan(cursor, match=pattern, count=KEYS_A_TRIP)
            for key in filter(None, map(_key, names)):
                if key not in seen:  # Redis may tell one twice
                    seen.add(key)
                    yield key
            if cursor == 0:
                return

    def namespaces(self) -> list[Namespace]:
        """See BlockingStore. Asks for the length of every page."""
        num_pages: dict[bytes, int] = defaultdict(int)
        num_bytes: dict[bytes, int] = defaultdict(int)
        for some in runs(self.scan(b""), KEYS_A_TRIP):
            for key, size in zip(some, self._each("strlen", some, Deadline(10.0)), strict=True):
                num_pages[key[:DIGEST_BYTES]] += 1
                num_bytes[key[:DIGEST_BYTES]] += size
        return [Namespace(digest, num, num_bytes[digest]) for digest, num in num_pages.items()]

    def totals(self) -> tuple[int | None, int | None]:
        """See BlockingStore: unknown; others use the server too."""
        return None, None

    def maintain(self) -> None:
        """See BlockingStore: nothing."""

    def close(self) -> None:
        """See BlockingStore."""
        with contextlib.suppress(errors.RedisError):
            self._client.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except errors.TimeoutError as error:
            text = f"Redis at {self._where} does not answer"
            raise StoreError(MoveFailure.TIMEOUT, text) from error
        except (errors.ConnectionError, OSError) as error:
            cause = self._without_secrets(error)
            text = f"Redis at {self._where} can't be reached: {cause}"
            raise StoreError(MoveFailure.UNAVAILABLE, text) from cause
        except errors.OutOfMemoryError as error:
            text = f"Redis at {self._where} is full"
            raise StoreError(MoveFailure.FULL, text) from self._without_secrets(error)
        except Exception as error:  # the client parses what anybody may have sent
            cause = self._without_secrets(error)
            raise self._nonsense(cause) from cause

    def _without_secrets(self, error: Exception) -> Exception:
        """The error, or one of its kind: a server that knows no AUTH quotes its arguments."""
        text = str(error)
        told = self._hidden(text.partition(", with args beginning with")[0])
        if told == text:
            return error
        kinds = (errors.AuthenticationError, errors.ResponseError, errors.ConnectionError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), errors.RedisError)
        return kind(told)

    def _nonsense(self, answer: object) -> StoreError:
        text = self._hidden(ascii(answer))[:100]
        return StoreError(MoveFailure.ERROR, f"Redis at {self._where} answered {text}")

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _secrets(parts: SplitResult) -> tuple[str, ...]:
    """The password as a text may quote it."""
    given = parts.password or ""
    plain = unquote(given)
    return tuple({text for text in (given, plain, ascii(plain)[1:-1]) if text})


def _name(key: bytes) -> bytes:
    digest, page_hash = key[:DIGEST_BYTES], key[DIGEST_BYTES:]
    return PREFIX + digest.hex().encode() + b":" + page_hash.hex().encode()


def _key(name: Any) -> bytes | None:
    """The key that a name stands for; None when somebody else wrote it."""
    try:
        key = bytes.fromhex(name[len(PREFIX) :].replace(b":", b"").decode("ascii"))
    except (ValueError, TypeError, AttributeError):
        return None
    return key if len(key) == KEY_BYTES and _name(key) == name else None
