"""vLLM's HYV3MTP drafts from the same logits: `pytest -m peers` with a Python that has vLLM."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.oracle.configs import hy_v3
from tests.speculative.drafting import VOCAB, chain, draft_logits, drawn

from moestro import envs
from moestro.core.model_config import parse_model_config

pytestmark = [pytest.mark.peers, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).with_name("vllm_mtp.py")
DRAFTS = 3


@pytest.mark.parametrize("seed", [5, 6])
def test_vllm_drafts_from_the_same_logits(seed: int, tmp_path: Path) -> None:
    """Chains of three: behind the prompt, and behind what vLLM kept of the one before."""
    # attention of vLLM on a CPU takes heads of 32 numbers and more
    config = hy_v3(num_nextn_predict_layers=1, vocab_size=VOCAB, head_dim=32, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = drawn(parse_model_config(config), seed, tmp_path)
    prompt = np.random.default_rng(seed).integers(VOCAB, size=21).tolist()
    kept = tmp_path / "logits.npy"
    python = envs.PEERS_PYTHON.get()
    if python is None:
        pytest.fail("MOESTRO_PEERS_PYTHON names no Python")
    command = [python, SCRIPT, tmp_path, json.dumps(prompt), str(DRAFTS), "9", kept]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(f"{python} has no vLLM")
    assert done.returncode == 0, done.stderr
    said: list[int] = json.loads(done.stdout.splitlines()[-1])
    theirs = np.load(kept)
    assert len(theirs) >= 2 * DRAFTS
    known, ours = [*prompt, said[0]], []
    for begin in range(0, len(theirs), DRAFTS):
        with draft_logits(model) as logits:
            drafts = chain(model, known, DRAFTS)
        ours.append(torch.stack(logits).numpy())
        assert theirs[begin : begin + DRAFTS].argmax(axis=1).tolist() == drafts
        ahead = said[len(known) - len(prompt) :]
        matching = [d == t for d, t in zip(drafts, ahead, strict=False)]
        accepted = [*matching, False].index(False)
        known += ahead[: accepted + 1]
    off = np.abs(np.concatenate(ours) - theirs).max()
    print(f"seed {seed}: {len(theirs)} draft logits, largest difference from vLLM {off:.1e}")
    assert off < 1e-4
