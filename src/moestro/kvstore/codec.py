"""What a stored page looks like: header, payload, checksum; the same bytes in every store.

    offset  bytes  field
         0      4  magic "MoKV"
         4      2  format version, 1
         6      2  reserved, zero
         8     16  namespace digest
        24     16  page hash
        40      8  payload bytes, n
        48      n  payload
    48 + n     16  XXH3-128 (canonical form) of everything before it

Little-endian. Nothing of a value is believed before its checksum has been compared: one that was
cut, mixed up, overwritten in part or put under another key is corrupt, whatever the store says.
XXH3-128 is no defence against somebody who forges values on purpose.
"""

import enum
import struct

import numpy as np
import xxhash

from moestro.core.page_store import Payload

MAGIC = b"MoKV"
VERSION = 1
DIGEST_BYTES = 16
HASH_BYTES = 16
_HEADER = struct.Struct("<4sHH16s16sQ")
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = 16
OVERHEAD_BYTES = HEADER_BYTES + CHECKSUM_BYTES


class Check(enum.StrEnum):
    """The check of a value that failed, in the order in which they are made."""

    SHORT = "shorter than a header and a checksum"
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


def encode(
    digest: bytes, page_hash: bytes, payload: Payload, out: memoryview | None = None
) -> memoryview:
    """The value to store, in `out` (payload + OVERHEAD_BYTES bytes) or memory of its own. The
    checksum is taken of this copy, not of `payload`: so it never vouches for bytes that changed
    while they were copied without the copy telling.
    """
    source = np.frombuffer(payload, np.uint8)
    end = HEADER_BYTES + source.nbytes
    view = np.empty(end + CHECKSUM_BYTES, np.uint8).data if out is None else out
    # numpy copies without the interpreter lock: the engine goes on meanwhile.
    np.copyto(np.frombuffer(view[HEADER_BYTES:end], np.uint8), source)
    _HEADER.pack_into(view, 0, MAGIC, VERSION, 0, digest, page_hash, source.nbytes)
    view[end:] = xxhash.xxh3_128_digest(view[:end])
    return view.toreadonly()


def decode(value: Payload, digest: bytes, page_hash: bytes) -> memoryview:
    """The payload inside `value`, without a copy. Raises CorruptValueError."""
    view = memoryview(value).cast("B")
    if view.nbytes < OVERHEAD_BYTES:
        raise CorruptValueError(Check.SHORT)
    magic, version, _, own_digest, own_hash, payload_bytes = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptValueError(Check.MAGIC)
    if version != VERSION:
        raise CorruptValueError(Check.VERSION)
    if payload_bytes != view.nbytes - OVERHEAD_BYTES:
        raise CorruptValueError(Check.LENGTH)
    end = view.nbytes - CHECKSUM_BYTES
    if xxhash.xxh3_128_digest(view[:end]) != view[end:]:
        raise CorruptValueError(Check.CHECKSUM)
    if own_digest != digest:
        raise CorruptValueError(Check.DIGEST)
    if own_hash != page_hash:
        raise CorruptValueError(Check.HASH)
    return view[HEADER_BYTES:end].toreadonly()
