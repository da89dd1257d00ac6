"""The comparison with HF transformers itself: `pytest -m peers`.

MOESTRO_PEERS_PYTHON names the Python of a virtual environment with transformers >= 5.24.
"""

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.oracle.configs import OracleCase, fresh_config
from tests.oracle.divergence import mean_kl
from tests.oracle.driver import drawn_model, greedy_tokens, prompt_logits, tiny_hy3
from tests.oracle.heldout import heldout_prompt, heldout_windows, judged_window, perplexity
from tests.oracle.perplexity import nll_of_windows
from tests.oracle.prompts import GREEDY_TOKENS, prompts_of, text_of

from moestro import envs
from moestro.core.model_config import parse_model_config
from moestro.weights.source import resolve_model

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
FRESH = tuple(fresh_config(t, s) for t in ("hy_v3", "qwen3_moe") for s in (101, 102, 103))


def _run_peer(*arguments: str) -> str:
    """Standard output of `python -m arguments...` in the peers' environment."""
    python = envs.PEERS_PYTHON.get()
    if python is None:
        pytest.fail(
            "MOESTRO_PEERS_PYTHON is not set: it must name the Python of a virtual environment "
            "with torch and transformers >= 5.24, or the comparison can't run."
        )
    done = subprocess.run(
        [str(python), "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{python} -m {' '.join(arguments)} failed:\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of HF's results on FRESH."""
    folder = tmp_path_factory.mktemp("goldens")
    cases = folder / "cases.json"
    cases.write_text(json.dumps([dataclasses.asdict(case) for case in FRESH]))
    arguments = ("--cases", str(cases), "--out", str(folder), "--full")
    print(_run_peer("tests.oracle.make_goldens", *arguments))
    return folder


@pytest.mark.parametrize("case", FRESH, ids=lambda case: case.name)
def test_fresh_models_equal_hf(case: OracleCase, goldens: Path) -> None:
    golden = np.load(goldens / f"{case.name}.npz")
    spec, prompts = parse_model_config(case.config), prompts_of(case)
    model = drawn_model(spec, case.seed, torch.float32)
    np.testing.assert_allclose(prompt_logits(model, prompts), golden["logits"], rtol=0, atol=1e-4)

    tokens = np.array(greedy_tokens(model, prompts[0], GREEDY_TOKENS))
    differing = np.flatnonzero(tokens != golden["greedy_tokens"])
    assert not len(differing) or golden["greedy_gaps"][differing[0]] <= 1e-4

    rounded = drawn_model(spec, case.seed, torch.bfloat16)
    ours = mean_kl(golden["text_logits"], prompt_logits(rounded, list(text_of(case))))
    theirs = float(golden["bf16_kl"].min())
    print(f"{case.name}: mean KL from HF fp32: ours bf16 {ours:.3e}, HF bf16 {theirs:.3e}")
    assert ours <= 1.05 * theirs + 1e-6


def test_tiny_hy3_equals_hf(tmp_path: Path) -> None:
    folder, kept = str(resolve_model("tiny-hy3")), tmp_path / "logits.npy"
    hf = json.loads(_run_peer("tests.oracle.hf_tiny_hy3", folder, "--logits", str(kept)))
    model, prompt = tiny_hy3(), heldout_prompt()
    ours = perplexity(nll_of_windows(model, heldout_windows()))
    print(f"tiny-hy3 perplexity: ours {ours:.6f}, HF {hf['perplexity']:.6f}")
    assert f"{ours:.4g}" == f"{hf['perplexity']:.4g}" == "7.604"

    tokens = np.array(greedy_tokens(model, prompt, len(hf["greedy_tokens"])))
    differing = np.flatnonzero(tokens != np.array(hf["greedy_tokens"]))
    assert not len(differing) or hf["greedy_gaps"][differing[0]] <= 1e-4

    teacher = np.load(kept)
    exact = prompt_logits(model, [judged_window()])
    np.testing.assert_allclose(exact, teacher, rtol=0, atol=1e-4)
    rounded = prompt_logits(tiny_hy3(torch.bfloat16), [judged_window()])
    kl = mean_kl(teacher, rounded)
    print(f"tiny-hy3: mean KL from HF fp32: ours bf16 {kl:.3e}, HF bf16 {hf['bf16_kl']:.3e}")
    assert kl <= 1.05 * hf["bf16_kl"] + 1e-6
