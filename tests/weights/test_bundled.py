"""The model that ships loads into the real model class."""

import torch

from moestro.core.model_config import load_model_spec
from moestro.models.registry import build_model
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model


def test_bundled_model_loads() -> None:
    folder = resolve_model("tiny-hy3")
    spec = load_model_spec(folder)
    assert spec.num_mtp_layers == 1
    model = build_model(spec, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    report = load_weights(model, folder)
    assert report.notes == ()
    assert report.num_tensors == 323
    assert not any(p.isnan().any() for p in model.state_dict().values())
    count = sum(p.numel() for p in model.parameters())
    assert count == spec.num_parameters + spec.num_mtp_parameters
    with Checkpoint.open(folder) as checkpoint:
        name = "model.layers.5.mlp.experts.7.up_proj.weight"
        stacked = model.state_dict()["model.layers.5.mlp.experts.gate_up_proj"]
        assert torch.equal(stacked[7, 128:], checkpoint.tensor(name))
