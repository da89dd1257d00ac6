"""What a KV page is called: a hash of every token up to its end, chained page by page.

Two pages have the same name only if their KV values are the same: the root of the chain holds the
namespace (everything outside the tokens that changes KV values) and the tenant's salt, each link
adds one page of token ids. 16 bytes, so that a collision is out of reach even for a store that
many engines fill for years.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(namespace: bytes, cache_salt: str) -> bytes:
    """The parent of every first page of one namespace and tenant."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"moestro.kv.root")
    digest.update(len(namespace).to_bytes(8, "little"))
    digest.update(namespace)
    digest.update(cache_salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


class PageHasher:
    """Hashes pages of `page_size` token ids, each a little-endian uint32."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pack = struct.Struct(f"<{page_size}I").pack

    def extend(self, hashes: list[bytes], parent: bytes, token_ids: Sequence[int]) -> None:
        """Append to `hashes` until it covers every full page of `token_ids`.

        `parent`: the last of `hashes`, or the root when there is none.

        Raises struct.error for a token id outside [0, 2^32).
        """
        size, pack = self._page_size, self._pack
        for begin in range(len(hashes) * size, len(token_ids) - size + 1, size):
            page = pack(*token_ids[begin : begin + size])
            parent = blake2b(parent + page, digest_size=HASH_BYTES).digest()
            hashes.append(parent)
