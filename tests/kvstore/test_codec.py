"""The layout of a stored page, and that no changed bit passes for the page that was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.kvstore.codec import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    OVERHEAD_BYTES,
    Check,
    CorruptValueError,
    decode,
    encode,
)

DIGEST, HASH = b"d" * 16, b"h" * 16


def failed_check(value: bytes, digest: bytes = DIGEST, page_hash: bytes = HASH) -> Check:
    with pytest.raises(CorruptValueError) as caught:
        decode(value, digest, page_hash)
    return caught.value.check


@given(st.binary(max_size=300))
def test_what_was_written_comes_back(payload: bytes) -> None:
    value = encode(DIGEST, HASH, payload)
    assert len(value) == len(payload) + OVERHEAD_BYTES
    assert decode(value, DIGEST, HASH) == payload
    assert decode(bytes(value), DIGEST, HASH) == payload


def test_the_bytes_on_the_disk_are_the_ones_documented() -> None:
    value = bytes(encode(bytes(range(16)), bytes(range(16, 32)), b"page"))
    assert value[:48].hex() == ("4d6f4b5601000000" + bytes(range(32)).hex() + "0400000000000000")
    assert value[48:52] == b"page"
    assert value[52:].hex() == "b5d135671851f6a9d4ef2548afef91b0"


def test_a_payload_is_not_copied_on_reading() -> None:
    value = bytearray(encode(DIGEST, HASH, b"page"))
    payload = decode(value, DIGEST, HASH)
    value[HEADER_BYTES] = ord("P")
    assert payload == b"Page"
    with pytest.raises(TypeError):
        payload[0] = 1


@pytest.mark.parametrize("payload", [b"", b"x", bytes(5000)])
def test_every_flipped_bit_is_seen(payload: bytes) -> None:
    value = encode(DIGEST, HASH, payload)
    step = 1 if len(value) < 200 else 97
    for bit in range(0, 8 * len(value), step):
        broken = bytearray(value)
        broken[bit // 8] ^= 1 << bit % 8
        failed_check(broken)


def test_the_message_names_the_check() -> None:
    value = bytes(encode(DIGEST, HASH, b"page"))
    assert failed_check(b"") is Check.SHORT
    assert failed_check(value[: OVERHEAD_BYTES - 1]) is Check.SHORT
    assert failed_check(b"X" + value[1:]) is Check.MAGIC
    assert failed_check(value[:4] + b"\2" + value[5:]) is Check.VERSION
    assert failed_check(value[:-1]) is Check.LENGTH
    assert failed_check(value + b"x") is Check.LENGTH
    assert failed_check(value[:HEADER_BYTES] + b"PAGE" + value[-CHECKSUM_BYTES:]) is Check.CHECKSUM
    assert failed_check(value, digest=b"e" * 16) is Check.DIGEST
    assert failed_check(value, page_hash=b"i" * 16) is Check.HASH
    assert str(CorruptValueError(Check.HASH)) == "a stored page is corrupt: page hash"


def test_writable_and_shaped_payloads() -> None:
    payload = memoryview(bytearray(range(24))).cast("B", (4, 6))
    value = encode(DIGEST, HASH, payload)
    assert decode(value, DIGEST, HASH) == bytes(range(24))
