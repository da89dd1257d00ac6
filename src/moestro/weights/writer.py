"""Rows of a checkpoint into a parameter's final format and layout."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from moestro.backends.base import Device
from moestro.errors import CheckpointError
from moestro.layers.parameters import Parameter
from moestro.quant.format import WeightTensor
from moestro.quant.fp8 import has_nan
from moestro.quant.weight import expert as expert_of
from moestro.quant.weight import quantize
from moestro.weights.name_map import RowCopy
from moestro.weights.stored import OpenWeight, blocks

_BLOCK_ELEMENTS = 2**19
"""What is converted at a time: its temporaries stay in the cache and count for nothing."""


class WeightWriter:
    """Writes rows into parameters; backend: the device that packs, None in the rows layout.

    A context manager: within, torch computes in the calling thread, and blocks are quantised by
    num_threads threads. Torch's own threads wait for each other after every small operation, which
    took 15 times as long where cores were short.
    """

    def __init__(self, backend: Device | None = None, num_threads: int = 1) -> None:
        self._backend = backend
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._torch_threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._executor = ThreadPoolExecutor(self._num_threads, "moestro-quantise")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def copy(self, name: str, source: OpenWeight, target: Parameter, copy: RowCopy) -> None:
        """One run of rows. name: the checkpoint tensor, for errors (CheckpointError)."""
        if isinstance(target, torch.Tensor):
            _copy_float(name, _float_rows(source, copy), _part(target, copy))
            return
        if target.format.is_float and not target.packed:
            _copy_float(name, _float_rows(source, copy), _part(target.codes, copy))
            return
        runs = list(blocks(copy.num_rows, target.in_features, _BLOCK_ELEMENTS))

        def convert(block: range) -> WeightTensor:
            rows = source.rows(copy.source + block.start, copy.source + block.stop)
            return _converted(name, rows, target)

        for block, rows in zip(runs, self._each(convert, runs), strict=True):
            self._write(target, rows, copy, copy.start + block.start)

    def _each(
        self, convert: Callable[[range], WeightTensor], runs: list[range]
    ) -> Iterator[WeightTensor]:
        """The converted blocks in order, a few of them ahead of time."""
        if self._executor is None or len(runs) == 1:
            yield from map(convert, runs)
            return
        ahead: deque[Future[WeightTensor]] = deque()
        for block in runs:
            ahead.append(self._executor.submit(convert, block))
            if len(ahead) > self._num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _write(self, target: WeightTensor, rows: WeightTensor, copy: RowCopy, start: int) -> None:
        if target.packed:
            assert self._backend is not None
            self._backend.pack_rows(target, rows, expert=copy.expert, start=start)
            return
        whole = target if copy.expert is None else expert_of(target, copy.expert)
        for into, from_ in (
            (whole.codes, rows.codes), (whole.scales, rows.scales), (whole.zeros, rows.zeros)
        ):  # fmt: skip
            if into is not None and from_ is not None:
                into[start : start + rows.num_rows].copy_(from_)


def _float_rows(source: OpenWeight, copy: RowCopy) -> torch.Tensor:
    rows = source.rows(copy.source, copy.source + copy.num_rows)
    assert isinstance(rows, torch.Tensor)
    return rows


def _part(tensor: torch.Tensor, copy: RowCopy) -> torch.Tensor:
    whole = tensor if copy.expert is None else tensor[copy.expert]
    return whole[copy.start : copy.start + copy.num_rows]


def _copy_float(name: str, rows: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(rows.view(target.shape))
    if target.dtype == torch.float16 != rows.dtype:
        _check_float16(name, rows, target)


def _check_float16(name: str, rows: torch.Tensor, target: torch.Tensor) -> None:
    low, high = target.aminmax()
    if torch.isinf(low) or torch.isinf(high):
        low, high = rows.aminmax()
        raise CheckpointError(
            f"tensor {name!r} reaches {max(-low.item(), high.item()):g}, above float16's 65504: "
            "use dtype bfloat16 or float32"
        )


def _converted(name: str, rows: torch.Tensor | WeightTensor, target: WeightTensor) -> WeightTensor:
    """Rows in the target's format."""
    if isinstance(rows, WeightTensor):
        if rows.format.name == "fp8" and has_nan(rows.codes):
            raise CheckpointError(f"tensor {name!r} holds NaN codes: the checkpoint is damaged")
        return rows
    try:
        made = quantize(rows, target.format)
    except ValueError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error
    if target.format.name == "float16" and rows.dtype != torch.float16:
        _check_float16(name, rows, made.codes)
    return made
