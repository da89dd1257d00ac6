"""The Plan in words: numbers a person compares, all of them."""

import json
from pathlib import Path

from moestro.config import EngineConfig
from moestro.core.hardware import HardwareSpec
from moestro.core.model_config import parse_model_config
from moestro.planner.placement import fit_plan, make_plan
from moestro.planner.report import fit_lines, plan_lines

DATA = Path(__file__).parents[1] / "core/data"
HY3 = parse_model_config(json.loads((DATA / "hub_hy3.json").read_text()))


def machine(available: int) -> HardwareSpec:
    return HardwareSpec("cpu", "test", available, available, 64, "avx512")


def test_lines_hold_the_numbers() -> None:
    text = "\n".join(plan_lines(make_plan("hy3", HY3, machine(10**12), EngineConfig())))
    for part in ("590.2 GB +", "327,680 bytes a token", "64 threads", "note: max_mod"):
        assert part in text
    assert "MTP" not in text
    assert text.isascii()


def test_lines_say_what_drafting_takes() -> None:
    drafting = EngineConfig(speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    text = "\n".join(plan_lines(make_plan("hy3", HY3, machine(10**12), drafting)))
    for part in ("597.7 GB with 1 MTP layer +", "331,776 bytes a token"):
        assert part in text
    assert "drafts by mtp: 2 a sequence and step" in text


def test_fit_lines_say_what_is_missing_or_left() -> None:
    config = EngineConfig(max_model_len=1000)
    yes = fit_lines(fit_plan("hy3", HY3, machine(10**12), config))
    assert yes[-1].startswith("fits: 1.00 TB")
    no = fit_lines(fit_plan("hy3", HY3, machine(10**11), config))
    assert no[-1].startswith("hy3 does not fit: ")
    assert "590.2 GB" in no[-1]
