"""The tensors of a model whose weights are floats in the rows layout."""

from collections.abc import Mapping

import torch

from moestro.layers.parameters import Parameter


def tensors_of(weights: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """Every parameter by name, to fill or to compare."""
    found = {}
    for name, parameter in weights.items():
        if not isinstance(parameter, torch.Tensor):
            assert parameter.format.is_float
            assert not parameter.packed
            parameter = parameter.codes
        found[name] = parameter
    return found
