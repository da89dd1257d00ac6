"""bench/make_model.py writes checkpoints that this package reads."""

import json
from pathlib import Path

import pytest
import torch
from bench.make_model import make_model, parse_args
from tests.fakes.parameters import tensors_of
from tokenizers import Tokenizer

from moestro.core.model_config import load_model_spec
from moestro.errors import MoestroError
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import load_weights

SMALL = [
    "--hidden-size=32", "--num-layers=3", "--num-heads=4", "--num-kv-heads=2", "--head-dim=16",
    "--num-experts=6", "--top-k=2", "--moe-intermediate-size=24", "--intermediate-size=40",
    "--vocab-size=300",
]  # fmt: skip


@pytest.mark.parametrize("extra", [["--model-type=qwen3_moe"], ["--model-type=hy_v3"],
                                   ["--model-type=hy_v3", "--num-mtp-layers=0"],
                                   ["--tie-word-embeddings", "--dtype=float32"]])  # fmt: skip
def test_made_model_loads(extra: list[str], tmp_path: Path) -> None:
    folder = make_model(parse_args([str(tmp_path / "m"), *SMALL, *extra, "--shard-bytes=50000"]))
    spec = load_model_spec(folder)
    model = build_model(spec, Parameters(torch.bfloat16))
    report = load_weights(spec, model.weights, folder)
    assert report.notes == ()
    assert len(report.files) > 1
    assert not any(p.isnan().any() for p in tensors_of(model.weights).values())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == spec.vocab_size == 300
    ids = tokenizer.encode("h\u00e9llo").ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "h\u00e9llo"
    assert tokenizer.decode([299]) == " w299"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_values_depend_on_seed_not_on_shards(tmp_path: Path) -> None:
    def read(name: str, *extra: str) -> dict[str, torch.Tensor]:
        with Checkpoint.open(make_model(parse_args([str(tmp_path / name), *SMALL, *extra]))) as c:
            return {n: c.tensor(n) for n in c.names()}

    one, sharded = read("one"), read("sharded", "--shard-bytes=30000")
    other = read("other", "--seed=1")
    assert all(torch.equal(one[n], sharded[n]) for n in one)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert not torch.equal(one[name], other[name])
    assert one[name].float().std() == pytest.approx(0.02, rel=0.2)


def test_defaults_are_the_issues_model() -> None:
    args = parse_args(["out"])
    assert (args.hidden_size, args.num_layers, args.num_heads, args.num_kv_heads) == (
        1024, 16, 16, 4)  # fmt: skip
    assert (args.num_experts, args.top_k, args.moe_intermediate_size) == (64, 8, 384)


def test_bad_arguments_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(SystemExit, match="exists already"):
        make_model(parse_args([str(tmp_path / "full")]))
    with pytest.raises(SystemExit, match="--vocab-size 100 is below 259"):
        make_model(parse_args([str(tmp_path / "m"), "--vocab-size=100"]))
    with pytest.raises(MoestroError, match="num_key_value_heads"):
        make_model(parse_args([str(tmp_path / "m"), "--num-kv-heads=3"]))
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_index_lists_every_tensor(tmp_path: Path) -> None:
    folder = make_model(parse_args([str(tmp_path / "m"), *SMALL, "--shard-bytes=50000"]))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(Checkpoint.open(folder).names())
