"""Each weight format on tiny-hy3: near bf16, and what its byte spec says in plain torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bench.accuracy import RUNS, load, loaded, reference_products, window_logits
from bench.make_quantized import Options, make_quantized
from tests.oracle.divergence import mean_kl
from tests.oracle.heldout import heldout_windows

from moestro.backends.cpu.library import has_native
from moestro.config import EngineConfig
from moestro.core.model_config import load_model_spec
from moestro.core.weight_format import WeightFormats
from moestro.planner.weight_formats import choose_weight_formats
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import stored_formats
from moestro.weights.source import resolve_model

LENGTH = 384
ALLOWED_KL = {"w8a8": 2e-3, "w4a8 g32": 2.5e-2, "w4a8 g128": 4e-2, "fp8": 3e-3}
"""Measured on all held-out text (docs/benchmarks.md) and doubled."""


def nll(logits: torch.Tensor, window: np.ndarray) -> float:
    targets = torch.from_numpy(window[1:])
    log_probs = logits[:-1].double().log_softmax(dim=-1)
    return -float(log_probs.gather(1, targets[:, None]).mean())


@pytest.fixture(scope="module")
def window() -> np.ndarray:
    return heldout_windows()[3][:LENGTH]


@pytest.fixture(scope="module")
def bf16(window: np.ndarray) -> torch.Tensor:
    return window_logits(loaded(RUNS["bfloat16"]), window)


def test_bf16_equals_fp32_to_a_thousandth(window: np.ndarray, bf16: torch.Tensor) -> None:
    exact = window_logits(loaded(RUNS["float32"]), window)
    assert abs(nll(bf16, window) - nll(exact, window)) < 1e-3


@pytest.mark.parametrize("name", ALLOWED_KL)
def test_near_bf16(name: str, window: np.ndarray, bf16: torch.Tensor) -> None:
    kl = mean_kl(bf16.numpy(), window_logits(loaded(RUNS[name]), window).numpy())
    print(f"{name}: KL from bf16 {kl:.2e}")
    assert 1e-5 < kl < ALLOWED_KL[name]


@pytest.mark.skipif(not has_native(), reason="the references are what serves")
@pytest.mark.parametrize("name", ALLOWED_KL)
def test_kernels_do_what_the_byte_spec_says(name: str, window: np.ndarray) -> None:
    """An activation in a thousand is rounded the other way, which is noise on so little text: on
    all of it perplexities agree to 0.05% (docs/benchmarks.md). A wrong scale is no such noise."""
    part = window[:192]
    ours = window_logits(loaded(RUNS[name]), part)
    with reference_products():
        simulated = window_logits(loaded(RUNS[name], packed=False), part)
    print(f"{name}: loss {nll(ours, part):.5f}, simulated {nll(simulated, part):.5f}")
    assert abs(nll(ours, part) - nll(simulated, part)) < 3e-3
    assert mean_kl(simulated.numpy(), ours.numpy()) < 0.25 * ALLOWED_KL[name]


@pytest.mark.parametrize("kind", ["hy3-fp8", "fp8-block"])
def test_an_fp8_checkpoint_computes_what_its_values_do(
    kind: str, window: np.ndarray, tmp_path: Path
) -> None:
    """The same logits as the dequantised checkpoint in fp32, but for the order of the sums."""
    source = resolve_model("tiny-hy3")
    folder = make_quantized(source, tmp_path / "q", kind, Options(), tmp_path / "float")
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        stored = stored_formats(checkpoint, spec, 1)
    formats, _ = choose_weight_formats(spec, EngineConfig(), "float32", 1, stored)
    part = window[:160]
    ours = window_logits(load(folder, torch.float32, formats), part)
    plain = WeightFormats.all_float("float32")
    wanted = window_logits(load(tmp_path / "float", torch.float32, plain), part)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-3)
