"""Both families against HF transformers, by goldens: see make_goldens for what they hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.oracle.configs import CONFIGS, OracleCase
from tests.oracle.divergence import mean_kl
from tests.oracle.driver import drawn_model, greedy_tokens, prompt_logits
from tests.oracle.prompts import GREEDY_TOKENS, probes_of, prompts_of, text_of

from moestro.core.model_config import parse_model_config

GOLDENS = Path(__file__).parent / "goldens"
LOGIT_TOLERANCE = 1e-4
every_case = pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case.name)


def _golden(case: OracleCase) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{case.name}.npz") as stored:
        return dict(stored)


@every_case
def test_fp32_logits_equal_hf_at_every_position(case: OracleCase) -> None:
    model = drawn_model(parse_model_config(case.config), case.seed, torch.float32)
    logits = prompt_logits(model, prompts_of(case), page_size=7)
    np.testing.assert_allclose(logits, _golden(case)["logits"], rtol=0, atol=LOGIT_TOLERANCE)


@every_case
def test_greedy_tokens_equal_hf(case: OracleCase) -> None:
    model = drawn_model(parse_model_config(case.config), case.seed, torch.float32)
    golden = _golden(case)
    tokens = np.array(greedy_tokens(model, prompts_of(case)[0], GREEDY_TOKENS))
    differing = np.flatnonzero(tokens != golden["greedy_tokens"])
    if len(differing):
        first = differing[0]
        gap = golden["greedy_gaps"][first]
        assert gap <= 1e-4, f"token {first} differs although HF's top-2 gap is {gap}"


@every_case
def test_bf16_is_as_near_to_fp32_as_hf_is(
    case: OracleCase, record_property: Callable[[str, object], None]
) -> None:
    # The teacher is our own fp32 model, shown to be HF's by a probe at every position; HF's
    # logits of the whole text are too large to keep. test_live_peers uses HF's own.
    spec, golden, text = parse_model_config(case.config), _golden(case), list(text_of(case))
    teacher = prompt_logits(drawn_model(spec, case.seed, torch.float32), text)
    probes = teacher[np.arange(len(teacher)), probes_of(case)]
    logsumexp = torch.from_numpy(teacher).double().logsumexp(-1).numpy()
    distance = np.maximum(
        abs(probes - golden["text_probes"]), abs(logsumexp - golden["text_logsumexp"])
    )
    # Among thousands of positions the router may meet a tie that fp32 rounding decides.
    assert (distance > LOGIT_TOLERANCE).sum() <= 2

    student = prompt_logits(drawn_model(spec, case.seed, torch.bfloat16), text)
    ours, theirs = mean_kl(teacher, student), float(golden["bf16_kl"].min())
    record_property("kl_ours", ours)
    record_property("kl_hf", theirs)
    print(f"{case.name}: mean KL from HF fp32: ours bf16 {ours:.3e}, HF bf16 {theirs:.3e}")
    assert ours <= 1.05 * theirs + 1e-6


def test_the_cases_cover_every_axis() -> None:
    specs = [parse_model_config(c.config) for c in CONFIGS]
    for model_type in ("hy_v3", "qwen3_moe"):
        family = [s for s in specs if s.model_type == model_type]
        moes = [s.moe for s in family if s.moe is not None]
        assert len(family) >= 12
        assert {s.tie_word_embeddings for s in family} == {True, False}
        assert any(s.head_dim * s.num_attention_heads != s.hidden_size for s in family)
        ratios = {s.num_attention_heads // s.num_key_value_heads for s in family}
        assert {1, 16} <= ratios
        assert {4, 192} <= {m.num_experts for m in moes}
        assert {1, 8} <= {m.num_experts_per_tok for m in moes}
        assert any(not any(s.moe_layers) for s in family)
        assert any(any(s.moe_layers) and not all(s.moe_layers) for s in family)
        assert {s.rope.rope_type for s in family} == {"default", "yarn"}
    hy_v3 = [s.moe for s in specs if s.model_type == "hy_v3" and s.moe is not None]
    assert max(m.num_shared_experts for m in hy_v3) > 1
    assert {m.fp32_combine for m in hy_v3} == {True, False}
    qwen3 = [s.moe for s in specs if s.model_type == "qwen3_moe" and s.moe is not None]
    assert {m.renormalize for m in qwen3} == {True, False}
