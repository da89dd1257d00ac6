"""How often the MTP layer's drafts are what a text says, computed apart from the drafter."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tests.oracle.driver import PagedLoop

from moestro.models.causal_lm import CausalLM

Matches = npt.NDArray[np.bool_]


@torch.inference_mode()
def chain_matches(model: CausalLM, text: Sequence[int], depth: int, begin: int = 0) -> Matches:
    """[L - depth - 1 - begin, depth]: whether draft s of the chain from slot p is text[p + 2 + s].

    Teacher-forced: draft s + 1 is drafted behind the text's own token, whatever draft s was. Row 0
    is slot `begin`. A slot's KV goes back to the trunk's hidden state before the next chain.
    """
    assert model.num_mtp_layers == 1
    tokens = torch.tensor(list(text))
    loop = PagedLoop(model, 1, len(text))
    hidden = loop.step([text])
    positions, whole = loop.metadata([0], [len(text) - 1])
    model.mtp_forward(hidden[:-1], tokens[1:], positions, loop.kv_pages, whole)
    rows = []
    for slot in range(begin, len(text) - depth - 1):
        m, found = hidden[slot : slot + 1], []
        for step in range(depth):
            at, attention = loop.metadata([slot + step], [1])
            behind = tokens[slot + step + 1 : slot + step + 2]
            m = model.mtp_forward(m, behind, at, loop.kv_pages, attention)
            found.append(int(model.compute_logits(m).argmax()) == int(tokens[slot + 2 + step]))
        rows.append(found)
        at, attention = loop.metadata([slot + 1], [depth - 1])
        last = slot + depth
        if depth > 1:
            ids = tokens[slot + 2 : last + 1]
            model.mtp_forward(hidden[slot + 1 : last], ids, at, loop.kv_pages, attention)
    return np.array(rows, bool).reshape(-1, depth)


def accepted_counts(matches: Matches) -> npt.NDArray[np.int64]:
    """Drafts kept of each chain: those before the first that differs."""
    counts: npt.NDArray[np.int64] = np.cumprod(matches, axis=1).sum(axis=1)
    return counts


def walked(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of the chains that are drafted where each step keeps its drafts and one token more."""
    taken, at = [], 0
    while at < len(counts):
        taken.append(counts[at])
        at += 1 + int(counts[at])
    return np.array(taken, np.int64)


def acceptance(counts: npt.NDArray[np.int64], depth: int) -> npt.NDArray[np.float64]:
    """[depth]: share of the chains whose draft s was kept, as vLLM's metric per position."""
    return np.array([(counts > s).mean() for s in range(depth)])
