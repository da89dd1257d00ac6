"""The held-out text of tiny-hy3, and what perplexity on it means."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

WINDOW = 2048
_FILE = Path(__file__).parents[1] / "data" / "tiny_hy3_heldout.npz"


def heldout_windows() -> npt.NDArray[np.int64]:
    """Token ids, [windows, WINDOW]; the windows don't see each other."""
    with np.load(_FILE) as stored:
        return stored["ids"].astype(np.int64).reshape(-1, WINDOW)


def heldout_prompt() -> npt.NDArray[np.int64]:
    """The tokens that are continued greedily, [96]."""
    return heldout_windows()[30][:96]


def judged_window() -> npt.NDArray[np.int64]:
    """The window on which bf16 is judged."""
    return heldout_windows()[10]


def window_nll(logits: torch.Tensor, window: npt.NDArray[np.int64]) -> float:
    """Sum over a window of the negative log likelihood of each token after the first, in nats.

    logits: [WINDOW, V].
    """
    targets = torch.from_numpy(window[1:])
    log_probs = logits[:-1].double().log_softmax(dim=-1)
    return -float(log_probs.gather(1, targets[:, None]).sum())


def perplexity(nll_sums: Sequence[float]) -> float:
    """exp of the mean over all predicted tokens of the windows."""
    return math.exp(sum(nll_sums) / (len(nll_sums) * (WINDOW - 1)))
