"""What a KV page is called: a hash of every token up to its end, chained page by page.

Two pages have the same name only if their KV values are the same: the root of the chain holds the
namespace (everything outside the tokens that changes KV values) and the tenant's salt, each link
adds one page of token ids. 16 bytes, so that a collision is out of reach even for a store that
many engines fill for years.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32.

    Raises OverflowError for a token id outside [0, 2^32).
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def root_hash(namespace: bytes, cache_salt: str) -> bytes:
    """The parent of every first page of one namespace and tenant."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"moestro.kv.root")
    digest.update(len(namespace).to_bytes(8, "little"))
    digest.update(namespace)
    digest.update(cache_salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def page_hashes(parent: bytes, packed: bytes | bytearray, page_size: int) -> list[bytes]:
    """Names of the full pages of `packed` tokens that follow the page (or root) named `parent`."""
    page_bytes = page_size * TOKEN_BYTES
    hashes = []
    for begin in range(0, len(packed) - page_bytes + 1, page_bytes):
        page = packed[begin : begin + page_bytes]
        parent = blake2b(parent + page, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
