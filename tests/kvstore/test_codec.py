"""The layout of a stored page, and that no changed bit passes for the page that was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.kvstore.codec import (
    SEAL_BYTES,
    Check,
    CorruptValueError,
    Value,
    checksum_of,
    join,
    seal,
    split,
    unseal,
)

DIGEST, HASH = b"d" * 16, b"h" * 16


def failed_check(blob: bytes, digest: bytes = DIGEST, page_hash: bytes = HASH) -> Check:
    with pytest.raises(CorruptValueError) as caught:
        unseal(split(blob), digest, page_hash)
    return caught.value.check


@given(st.binary(max_size=300))
def test_what_was_written_comes_back(payload: bytes) -> None:
    value = seal(DIGEST, HASH, payload)
    assert value.num_bytes == len(join(value)) == len(payload) + SEAL_BYTES
    assert unseal(value, DIGEST, HASH) == payload
    assert unseal(split(join(value)), DIGEST, HASH) == payload


def test_the_bytes_on_the_disk_are_the_ones_documented() -> None:
    value = seal(bytes(range(16)), bytes(range(16, 32)), b"page")
    header = "4d6f4b5602000000" + bytes(range(32)).hex() + "0400000000000000"
    assert value.seal[:48].hex() == header
    assert value.seal[48:].hex() == "7169984d98a6bd93772ae26858476401"
    assert join(value) == value.seal + b"page"


def test_a_payload_is_not_copied() -> None:
    payload = bytearray(b"page")
    value = seal(DIGEST, HASH, payload)
    read = unseal(value, DIGEST, HASH)
    payload[0] = ord("P")
    assert read == b"Page"
    with pytest.raises(TypeError):
        read[0] = 1


def test_a_payload_that_changes_after_it_was_sealed_is_corrupt() -> None:
    payload = bytearray(b"page")
    value = seal(DIGEST, HASH, payload)
    payload[0] = ord("P")
    assert failed_check(join(value)) is Check.CHECKSUM


def test_a_checksum_taken_on_the_way_is_the_one_compared() -> None:
    value = seal(DIGEST, HASH, b"page")
    good = checksum_of(value.seal, memoryview(b"page"))
    assert unseal(Value(value.seal, b"page", good), DIGEST, HASH) == b"page"
    with pytest.raises(CorruptValueError) as caught:
        unseal(Value(value.seal, b"page", bytes(16)), DIGEST, HASH)
    assert caught.value.check is Check.CHECKSUM


@pytest.mark.parametrize("payload", [b"", b"x", bytes(5000)])
def test_every_flipped_bit_is_seen(payload: bytes) -> None:
    blob = join(seal(DIGEST, HASH, payload))
    step = 1 if len(blob) < 200 else 97
    for bit in range(0, 8 * len(blob), step):
        broken = bytearray(blob)
        broken[bit // 8] ^= 1 << bit % 8
        failed_check(broken)


def test_the_message_names_the_check() -> None:
    blob = join(seal(DIGEST, HASH, b"page"))
    assert failed_check(b"") is Check.SHORT
    assert failed_check(blob[: SEAL_BYTES - 1]) is Check.SHORT
    assert failed_check(b"X" + blob[1:]) is Check.MAGIC
    assert failed_check(blob[:4] + b"\1" + blob[5:]) is Check.VERSION
    assert failed_check(blob[:-1]) is Check.LENGTH
    assert failed_check(blob + b"x") is Check.LENGTH
    assert failed_check(blob[:SEAL_BYTES] + b"PAGE") is Check.CHECKSUM
    assert failed_check(blob, digest=b"e" * 16) is Check.DIGEST
    assert failed_check(blob, page_hash=b"i" * 16) is Check.HASH
    assert str(CorruptValueError(Check.HASH)) == "a stored page is corrupt: page hash"


def test_writable_and_shaped_payloads() -> None:
    payload = memoryview(bytearray(range(24))).cast("B", (4, 6))
    assert unseal(seal(DIGEST, HASH, payload), DIGEST, HASH) == bytes(range(24))
