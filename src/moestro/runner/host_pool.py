"""HostPool: pages in host memory, and how they get there from the device's pages and back."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch

from moestro.core.page_store import Payload
from moestro.ops.kv_pages import KVPages
from moestro.quant.kv import LARGEST_CODE, dequantize_rows, quantize_rows
from moestro.runner.kv_pool import KVPool
from moestro.runner.page_layout import PageLayout


class HostPool:
    """num_slots pages in the canonical layout, of the device's element type or a narrower one.

    A narrower type is lossy: bf16 rows become codes and scales of quant.kv and come back rounded.
    Copies are plain memory moves that release the interpreter's lock; they neither lock nor check:
    who calls owns the pages and slots named. The memory is taken page by page as it is written,
    and lives as long as anybody holds a view of it.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        num_slots: int,
        dtype: torch.dtype | None = None,
        *,
        pin: bool = False,
    ) -> None:
        """dtype None: the device's. pin: page-locked memory, for devices that copy from it."""
        first = kv_pool.layers[0]
        dtype = first.k.dtype if dtype is None else dtype
        self.layout = PageLayout(
            len(kv_pool.layers), first.num_kv_heads, first.page_size, first.head_dim, dtype
        )
        self.num_slots = num_slots
        self.is_lossy = dtype != first.k.dtype
        layout = self.layout
        memory = torch.empty(num_slots * layout.page_bytes, dtype=torch.uint8, pin_memory=pin)
        self._slots = memory.numpy().reshape(num_slots, layout.page_bytes)
        by_layer = self._slots.reshape(num_slots, layout.num_layers, layout.num_kv_heads, -1)
        self._host = [by_layer[..., part] for part in layout.parts]
        self._layers = kv_pool.layers
        self._device = _parts(kv_pool.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one slot."""
        return self.layout.page_bytes

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    def save(self, layers: range, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Some layers, one after the other, of device pages into slots."""
        if self.is_lossy:
            for layer in layers:
                self._save_lossy(layer, pages, slots)
            return
        some = slice(layers.start, layers.stop)
        for page, slot, count in _runs(pages, slots):
            for held, host in self._copies():
                # all layers at once: after each copy the thread has to wait for the interpreter
                host[slot : slot + count, some] = held[page : page + count, some]

    def load(self, layer: int, slots: Sequence[int], pages: Sequence[int]) -> None:
        """One layer of slots into device pages."""
        if self.is_lossy:
            self._load_lossy(layer, slots, pages)
            return
        for page, slot, count in _runs(pages, slots):
            for held, host in self._copies():
                held[page : page + count, layer] = host[slot : slot + count, layer]

    def payload(self, slot: int) -> memoryview:
        """The bytes of a slot, not copied."""
        return memoryview(self._slots[slot])

    def fill(self, slot: int, payload: Payload) -> None:
        """Copy a page's bytes into a slot. Raises ValueError when they are not as many."""
        self._slots[slot] = np.frombuffer(payload, np.uint8)

    def close(self) -> None:
        """Let go of the device's pages and of the memory. Idempotent."""
        self._device, self._layers, self._host = (), (), []
        self._slots = np.empty((0, self.layout.page_bytes), np.uint8)

    def _copies(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Device and host bytes of each part, [P, L, G, *] and [num_slots, L, G, *]."""
        if not self._device:
            raise IndexError("the pool is closed")
        return zip(self._device, self._host, strict=True)

    def _save_lossy(self, layer: int, pages: Sequence[int], slots: Sequence[int]) -> None:
        dtype, pool = self.layout.dtype, self._layers[layer]
        # A head at a time: below the size at which torch would start threads of its own.
        for page, slot in zip(pages, slots, strict=True):
            for head in range(self.layout.num_kv_heads):
                rows = pool.k[page, head], pool.v[page, head]
                if dtype in LARGEST_CODE:
                    (k, k_scales), (v, v_scales) = (quantize_rows(r, dtype) for r in rows)
                    tensors = [k, v, k_scales, v_scales]
                else:
                    tensors = [r.to(dtype) for r in rows]
                for host, tensor in zip(self._host, tensors, strict=True):
                    host[slot, layer, head] = _flat_bytes(tensor)

    def _load_lossy(self, layer: int, slots: Sequence[int], pages: Sequence[int]) -> None:
        layout, pool = self.layout, self._layers[layer]
        for slot, page in zip(slots, pages, strict=True):
            for head in range(layout.num_kv_heads):
                # copied: a scale may lie at any byte
                held = [torch.from_numpy(h[slot, layer, head].copy()) for h in self._host]
                scales = [t.view(torch.float32) for t in held[2:]]
                for i, target in enumerate((pool.k, pool.v)):
                    codes, row_scales = held[i], scales[i] if scales else None
                    rows = codes.view(layout.dtype).view(layout.page_size, layout.head_dim)
                    target[page, head] = dequantize_rows(rows, row_scales).to(target.dtype)


def _parts(layers: Sequence[KVPages]) -> tuple[np.ndarray, ...]:
    """All layers' k, v and scales as bytes [P, L, G, *], over the same memory.

    By address: a tensor that torch made an array of could not give its memory back any more.
    """
    by_layer = [(pages.k, pages.v, pages.k_scales, pages.v_scales) for pages in layers]
    parts = [[t for t in tensors if t is not None] for tensors in zip(*by_layer, strict=True)]
    return tuple(_bytes_of(tensors) for tensors in parts if tensors)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Contiguous tensors [P, G, ...] that lie at equal distances, as KVPool's layers do."""
    first = tensors[0]
    places = [t.data_ptr() for t in tensors]
    step = places[1] - places[0] if len(places) > 1 else first.nbytes
    assert all(b - a == step for a, b in pairwise(places))
    pages, heads, row = *first.shape[:2], first[0, 0].nbytes
    described = {
        "data": (places[0], False),
        "shape": (pages, len(tensors), heads, row),
        "strides": (heads * row, step, row, 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _flat_bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return array


def _runs(pages: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first page, first slot, how many) of stretches in which both rise one by one."""
    pairs = list(zip(pages, slots, strict=True))
    breaks = [i for i, (a, b) in enumerate(pairwise(pairs), start=1) if b != (a[0] + 1, a[1] + 1)]
    for begin, end in pairwise([0, *breaks, len(pairs)] if pairs else [0]):
        yield *pairs[begin], end - begin
