"""The model that ships, on its held-out text, against the numbers of HF transformers."""

import json
from pathlib import Path

import pytest
from tests.oracle.driver import tiny_hy3
from tests.oracle.heldout import heldout_windows, perplexity
from tests.oracle.perplexity import nll_of_windows

HF = json.loads((Path(__file__).parent / "goldens" / "tiny_hy3.json").read_text())


def test_stored_numbers_are_those_of_the_model_card() -> None:
    assert perplexity(HF["window_nll"]) == pytest.approx(7.604, abs=5e-4)
    assert len(HF["window_nll"]) == len(heldout_windows())


def test_perplexity_of_part_of_the_heldout_text_equals_hf() -> None:
    windows = heldout_windows()[3:5]
    sums = nll_of_windows(tiny_hy3(), windows)
    assert sums == pytest.approx(HF["window_nll"][3:5], rel=1e-6)
    assert f"{perplexity(sums):.4g}" == f"{perplexity(HF['window_nll'][3:5]):.4g}"
