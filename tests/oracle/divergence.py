"""How far one set of logits is from another."""

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating]


def mean_kl(teacher: Logits, student: Logits) -> float:
    """Mean over rows of KL(softmax(teacher) || softmax(student)), in nats; logits [rows, V]."""
    log_p, log_q = _log_softmax(teacher), _log_softmax(student)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean())


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
