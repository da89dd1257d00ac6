"""TokenTally against collections.Counter."""

import random
from collections import Counter

import numpy as np

from moestro.runner.token_tally import TokenTally


def test_counts_match_a_counter_over_long_outputs():
    rng = random.Random(3)
    prompt = [rng.randrange(50) for _ in range(30)]
    output = [rng.randrange(2000) for _ in range(40)]
    tally = TokenTally(np.array(prompt, np.int64), np.array(output, np.int64))
    for _ in range(3000):
        token = rng.randrange(2000)
        output.append(token)
        tally.add(token)
    counter = Counter(output)
    got = dict(zip(tally.token_ids.tolist(), tally.counts.tolist(), strict=True))
    assert got == {token: counter[token] for token in {*prompt, *output}}
    assert len(tally.token_ids) == len(got)


def test_an_empty_prompt_side_is_fine():
    tally = TokenTally(np.array([7], np.int64), np.zeros(0, np.int64))
    assert tally.token_ids.tolist() == [7]
    assert tally.counts.tolist() == [0]
