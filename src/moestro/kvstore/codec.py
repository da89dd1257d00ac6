"""What a stored page looks like: a seal and a payload; the same bytes in every store.

    offset  bytes  field of the seal
         0      4  magic "MoKV"
         4      2  format version, 2
         6      2  reserved, zero
         8     16  namespace digest
        24     16  page hash
        40      8  payload bytes
        48     16  XXH3-128 (canonical form) of the 48 bytes before it and the payload

Little-endian. A store keeps the two side by side or one behind the other (`join`, `split`): a
payload that needn't be moved to make room for a header goes there from where it lies. Nothing of a
value is believed before its checksum has been compared: one that was cut, mixed up, overwritten in
part or put under another key is corrupt, whatever the store says. XXH3-128 is no defence against
somebody who forges values on purpose.
"""

import enum
import struct
from typing import NamedTuple

import xxhash

from moestro.core.page_store import Payload

MAGIC = b"MoKV"
VERSION = 2
DIGEST_BYTES = 16
HASH_BYTES = 16
_HEADER = struct.Struct("<4sHH16s16sQ")
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = 16
SEAL_BYTES = HEADER_BYTES + CHECKSUM_BYTES


class Value(NamedTuple):
    """A stored page. checksum: of the seal's header and the payload as they were read, where the
    store has taken it while they were in the processor's cache."""

    seal: bytes
    payload: Payload
    checksum: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return len(self.seal) + memoryview(self.payload).nbytes


class Check(enum.StrEnum):
    """The check of a value that failed, in the order in which they are made."""

    SHORT = "shorter than a seal"
    MAGIC = "magic"
    VERSION = "format version"
    LENGTH = "length"
    CHECKSUM = "checksum"
    DIGEST = "namespace digest"
    HASH = "page hash"


class CorruptValueError(Exception):
    """A stored value that isn't what was written under its key; `check` says what gave it away."""

    def __init__(self, check: Check) -> None:
        super().__init__(f"a stored page is corrupt: {check.value}")
        self.check = check


def seal(digest: bytes, page_hash: bytes, payload: Payload) -> Value:
    """The value to store, over the caller's payload. If that changes before a store has taken its
    copy, the copy fails its check: the checksum never vouches for what it has not seen.
    """
    data = memoryview(payload).cast("B")
    header = _HEADER.pack(MAGIC, VERSION, 0, digest, page_hash, data.nbytes)
    return Value(header + checksum_of(header, data), data)


def unseal(value: Value, digest: bytes, page_hash: bytes) -> memoryview:
    """The payload of `value`, without a copy. Raises CorruptValueError."""
    data = memoryview(value.payload).cast("B")
    if len(value.seal) != SEAL_BYTES:
        raise CorruptValueError(Check.SHORT)
    magic, version, _, own_digest, own_hash, payload_bytes = _HEADER.unpack_from(value.seal)
    if magic != MAGIC:
        raise CorruptValueError(Check.MAGIC)
    if version != VERSION:
        raise CorruptValueError(Check.VERSION)
    if payload_bytes != data.nbytes:
        raise CorruptValueError(Check.LENGTH)
    found = value.checksum
    if found is None:
        found = checksum_of(value.seal, data)
    if found != value.seal[HEADER_BYTES:]:
        raise CorruptValueError(Check.CHECKSUM)
    if own_digest != digest:
        raise CorruptValueError(Check.DIGEST)
    if own_hash != page_hash:
        raise CorruptValueError(Check.HASH)
    return data.toreadonly()


def checksum_of(header: bytes, payload: memoryview) -> bytes:
    """What a seal with this header (or a seal that starts so) has to end with."""
    hasher = xxhash.xxh3_128(header[:HEADER_BYTES])
    hasher.update(payload)  # without the interpreter's lock: the engine goes on meanwhile
    return hasher.digest()


def join(value: Value) -> bytes:
    """One value in one piece: the seal, then the payload."""
    return b"".join((value.seal, value.payload))


def split(blob: Payload) -> Value:
    """What `join` made, without a copy of the payload; too short a seal when there is less."""
    view = memoryview(blob).cast("B")
    return Value(bytes(view[:SEAL_BYTES]), view[SEAL_BYTES:])
