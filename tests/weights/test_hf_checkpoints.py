"""What HF transformers saves, and what it holds in memory, load to the same bits."""

import subprocess
from pathlib import Path

import pytest
import torch
from tests.fakes.parameters import tensors_of

from moestro import envs
from moestro.core.model_config import load_model_spec
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.weights.loader import load_weights

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = envs.PEERS_PYTHON.get()
    if python is None:
        pytest.fail("MOESTRO_PEERS_PYTHON names no Python with transformers")
    folder = tmp_path_factory.mktemp("hf")
    script = Path(__file__).with_name("hf_writer.py")
    subprocess.run([str(python), str(script), str(folder)], check=True, timeout=250)
    return folder


@pytest.mark.parametrize("model_type", ["hy_v3", "qwen3_moe"])
def test_saved_equals_memory(model_type: str, saved: Path) -> None:
    folder = saved / f"{model_type}-saved"
    spec = load_model_spec(folder)
    states = []
    for spelling in ("saved", "memory"):
        model = build_model(spec, Parameters(torch.float32))
        load_weights(spec, model.weights, saved / f"{model_type}-{spelling}")
        states.append(tensors_of(model.weights))
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert states[0]["model.layers.1.mlp.gate.weight"].std() > 0
    if model_type == "hy_v3":
        assert states[0]["model.layers.1.mlp.expert_bias"].std() > 0
