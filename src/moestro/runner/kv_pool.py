"""KVPool: the memory of the paged KV cache on one device."""

import torch

from moestro.core.model_spec import ModelSpec
from moestro.ops.kv_pages import KVPages


class KVPool:
    """num_pages pages of page_size tokens for each of num_layers layers, keys and values apart.

    layers[i]: the KVPages of layer i, k and v [P, G, B, D]. One allocation, never written here:
    the operating system gives memory page by page as keys arrive. num_layers counts MTP layers
    too when they keep KV; the default is the trunk's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        num_layers: int | None = None,
    ) -> None:
        layers = spec.num_hidden_layers if num_layers is None else num_layers
        page = (spec.num_key_value_heads, page_size, spec.head_dim)
        memory = torch.empty((layers, 2, num_pages, *page), dtype=dtype)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = memory.nbytes
        self.layers = tuple(KVPages(k, v) for k, v in memory.unbind(0))
        self._storage = memory.untyped_storage()

    def close(self) -> None:
        """Give the memory back now, whoever still holds a view of it. Idempotent."""
        self.layers = ()
        self._storage.resize_(0)
