"""Memory for what a body returns or needs on its way."""

import torch

from moestro.backends.cpu import capture


def new_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor; in a capture, of the graphs' arena."""
    recorder = capture.current()
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.new_empty(shape, dtype)
