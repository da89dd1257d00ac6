"""Drafts of tiny-hy3 on its held-out text are kept as often as an offline count says."""

import numpy as np
from tests.oracle.heldout import heldout_windows
from tests.speculative.acceptance import accepted_counts, chain_matches, walked
from tests.speculative.drafting import Bench, loaded

from moestro.core.model_config import load_model_spec
from moestro.weights.source import resolve_model

DEPTH = 3
PROMPT = 96
LENGTH = 260


def test_the_drafter_keeps_what_the_offline_count_keeps() -> None:
    """A text is said in steps of the drafts it agrees with and one token more."""
    folder = resolve_model("tiny-hy3")
    model = loaded(load_model_spec(folder), folder)
    text = heldout_windows()[7][:LENGTH].tolist()
    counts = accepted_counts(chain_matches(model, text, DEPTH, PROMPT - 1))
    bench = Bench(model, max_len=LENGTH + DEPTH, page_size=16)
    drafts: tuple[int, ...]
    (drafts,) = bench.step([text[:PROMPT]], [text[PROMPT]], [DEPTH])
    said, kept = PROMPT + 1, []
    while said + DEPTH <= LENGTH:
        ahead = text[said : said + DEPTH]
        count = [*(d == t for d, t in zip(drafts, ahead, strict=True)), False].index(False)
        kept.append(count)
        if said + count >= LENGTH:
            break
        run = [text[said - 1], *drafts]
        (drafts,) = bench.step([run], [text[said + count]], [DEPTH], [DEPTH - count])
        said += count + 1
    expected = walked(counts)
    assert len(expected) > 60
    assert kept == expected.tolist()
    # every draft is right at 72%, 43% and 28% of the window's first 400 positions
    assert 0.5 < np.mean(counts > 0) < 0.9
