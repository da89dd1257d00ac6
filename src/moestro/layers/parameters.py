"""Parameters: a model's weights, allocated in their final formats and known by name."""

import copy
from typing import Self

import torch

from moestro.backends.base import Device
from moestro.core.weight_format import WeightFormats
from moestro.quant.format import WeightTensor
from moestro.quant.weight import new_rows

Parameter = torch.Tensor | WeightTensor
"""A plain tensor (norms, router, embedding table), or a weight in one of the formats."""


class Parameters:
    """Allocates parameters, unfilled, and keeps them by name in `by_name`.

    dtype: of the activations and of plain tensors. formats: of the weights, by default all in
    dtype. backend: whose packed layout the weights take when it has one; None is the rows layout,
    on `device`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        formats: WeightFormats | None = None,
        device: torch.device | str = "cpu",
        backend: Device | None = None,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self.device = device
        self.formats = WeightFormats.all_float(name) if formats is None else formats
        self.by_name: dict[str, Parameter] = {}
        self._backend = backend if backend is not None and backend.packs_weights else None
        self._prefix = ""

    @property
    def packs(self) -> bool:
        """Whether weights take a device's packed layout, which only its kernels read."""
        return self._backend is not None

    def within(self, module: str) -> Self:
        """The same, for the parameters of a module: its name goes before theirs."""
        inner = copy.copy(self)
        inner._prefix = f"{self._prefix}{module}."
        return inner

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor, by default in the model's dtype."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.by_name[self._prefix + name] = made
        return made

    def weight(self, name: str, *shape: int, paired: bool = False) -> WeightTensor:
        """A weight [M, K] or [E, M, K] in the format its name asks for.

        paired: the rows are halves that are used together, gate then up. Raises ValueError when
        the format's groups don't divide K.
        """
        full = self._prefix + name
        weight_format = self.formats.of(full)
        if self._backend is None:
            made = new_rows(weight_format, shape, paired=paired, device=self.device)
        else:
            size = self._backend.packed_bytes(weight_format, shape, paired=paired)
            codes = torch.empty(size, dtype=torch.uint8, device=self.device)
            made = WeightTensor(weight_format, shape, codes, packed=True, paired=paired)
        self.by_name[full] = made
        return made
