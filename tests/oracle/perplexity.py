"""Our model on windows of text."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from tests.oracle.driver import PagedLoop
from tests.oracle.heldout import WINDOW, window_nll

from moestro.models.causal_lm import CausalLM

CHUNKS = (700, WINDOW - 700)


def nll_of_windows(model: CausalLM, windows: Iterable[npt.NDArray[np.int64]]) -> list[float]:
    """Sum of negative log likelihoods of each window, prefilled in two uneven chunks."""
    sums = []
    for window in windows:
        loop = PagedLoop(model, 1, WINDOW, page_size=64)
        parts = np.split(window, np.cumsum(CHUNKS)[:-1])
        hidden = [loop.step([part]) for part in parts]
        logits = model.compute_logits(torch.cat(hidden))
        sums.append(window_nll(logits, window))
    return sums
