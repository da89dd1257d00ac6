"""The model that ships loads into the real model class."""

import torch
from tests.fakes.parameters import tensors_of

from moestro.core.model_config import load_model_spec
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model


def test_bundled_model_loads() -> None:
    folder = resolve_model("tiny-hy3")
    spec = load_model_spec(folder)
    assert spec.num_mtp_layers == 1
    model = build_model(spec, Parameters(torch.bfloat16))
    tensors = tensors_of(model.weights)
    for parameter in tensors.values():
        parameter.fill_(float("nan"))
    report = load_weights(spec, model.weights, folder)
    assert report.notes == ()
    assert report.num_tensors == 323
    assert not any(p.isnan().any() for p in tensors.values())
    count = sum(p.numel() for p in tensors.values())
    assert count == spec.num_parameters + spec.num_mtp_parameters
    with Checkpoint.open(folder) as checkpoint:
        name = "model.layers.5.mlp.experts.7.up_proj.weight"
        stacked = tensors["model.layers.5.mlp.experts.gate_up_proj"]
        assert torch.equal(stacked[7, 128:], checkpoint.tensor(name))
