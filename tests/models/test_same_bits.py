"""A token's hidden state has the same bits however the work around it is cut."""

import pytest
import torch
from tests.oracle.configs import YARN, Config, hy_v3, qwen3_moe
from tests.oracle.driver import PagedLoop, drawn_model

from moestro.backends.cpu import library
from moestro.core.model_config import parse_model_config
from moestro.models.causal_lm import CausalLM

pytestmark = pytest.mark.skipif(
    not library.has_native(), reason="only the native bodies promise it on CPU"
)
LENGTHS = (70, 1, 33, 130)


@pytest.fixture(
    scope="module",
    params=[
        hy_v3(num_experts=12, head_dim=24, num_shared_experts=2),
        qwen3_moe(num_attention_heads=16, num_key_value_heads=1, rope_parameters=YARN),
    ],
    ids=["hy_v3", "qwen3_moe"],
)
def config(request: pytest.FixtureRequest) -> Config:
    return request.param


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest, config: Config) -> CausalLM:
    return drawn_model(parse_model_config(config), 9, request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: CausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states of each prompt, prefilled whole and by itself."""
    return [PagedLoop(model, 1, len(p)).step([p]) for p in prompts]


def test_batch_equals_singles(
    model: CausalLM, prompts: list[list[int]], alone: list[torch.Tensor]
) -> None:
    together = PagedLoop(model, len(prompts), max(LENGTHS)).step(prompts)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_equal_whole(
    model: CausalLM, prompts: list[list[int]], alone: list[torch.Tensor], chunk: int
) -> None:
    loop = PagedLoop(model, 1, LENGTHS[-1], page_size=7)
    runs = [prompts[-1][i : i + chunk] for i in range(0, LENGTHS[-1], chunk)]
    assert torch.equal(torch.cat([loop.step([run]) for run in runs]), alone[-1])


def test_decode_mixed_with_prefill_equals_whole(
    model: CausalLM, prompts: list[list[int]], alone: list[torch.Tensor]
) -> None:
    loop = PagedLoop(model, 3, max(LENGTHS))
    a, _, b, c = prompts
    found: list[list[torch.Tensor]] = [[], [], []]
    for runs in (
        (a[:69], [], c[:100]),
        (a[69:], b[:1], c[100:101]),
        ([], b[1:32], c[101:]),
        ([], b[32:], []),
    ):
        hidden = loop.step(runs).split([len(run) for run in runs])
        for rows, part in zip(found, hidden, strict=True):
            rows.append(part)
    for rows, whole in zip(found, (alone[0], alone[2], alone[3]), strict=True):
        assert torch.equal(torch.cat(rows), whole)


def test_logits_are_not_rounded_and_equal_row_by_row(
    model: CausalLM, alone: list[torch.Tensor]
) -> None:
    hidden = alone[0]
    logits = model.compute_logits(hidden)
    weight = model.lm_head.codes
    exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    for row in (0, 33, 69):
        assert torch.equal(model.compute_logits(hidden[row : row + 1])[0], logits[row])
