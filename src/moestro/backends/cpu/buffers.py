"""Memory for what a body returns or needs on its way."""

import torch


def new_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor."""
    return torch.empty(shape, dtype=dtype)
