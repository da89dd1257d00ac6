"""Checkpoint: which files count, what they must agree on, and data that is never copied."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.weights.spellings import hub_tensors, tiny_spec, write_sharded, write_single

from moestro.errors import CheckpointError
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.source import resolve_model


def test_bundled_checkpoint() -> None:
    with Checkpoint.open(resolve_model("tiny-hy3")) as checkpoint:
        assert len(checkpoint.names()) == 323
        assert checkpoint.shape("model.embed_tokens.weight") == (4096, 256)
        assert checkpoint.dtype("model.layers.1.mlp.expert_bias") == "F32"
        assert checkpoint.tensor("lm_head.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64,
                                   torch.bool, torch.float8_e4m3fn])  # fmt: skip
def test_data_is_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(3, 5).to(dtype)
    save_file({"a": values, "empty": torch.zeros(0, 2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    read = checkpoint.tensor("a")
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))
    assert checkpoint.tensor("empty").shape == (0, 2)
    checkpoint.release("a")
    checkpoint.close()
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8)), "outlives the checkpoint"


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    Checkpoint.open(tmp_path).tensor("a").fill_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_unaligned_data(tmp_path: Path) -> None:
    """A header that isn't padded to 8 bytes leaves fp32 data at an odd address."""
    values = torch.randn(4)
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    header += b" " * ((1 - 8 - len(header)) % 4)
    assert (8 + len(header)) % 4 == 1
    raw = struct.pack("<Q", len(header)) + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert torch.equal(Checkpoint.open(tmp_path).tensor("a"), values)


def test_which_files_count(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "part-2.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "part-1.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert [f.name for f in checkpoint.files] == ["part-1.safetensors", "part-2.safetensors"]
    assert checkpoint.names() == ("b", "a")
    assert checkpoint.file_name("a") == "part-2.safetensors"
    write_sharded(tmp_path, [{"c": torch.zeros(1)}, {"d": torch.zeros(1)}])
    assert Checkpoint.open(tmp_path).names() == ("c", "d")
    write_single(tmp_path, {"e": torch.zeros(1)})
    assert Checkpoint.open(tmp_path).names() == ("e",)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="only pickled weights"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in one\.safetensors and in two\.saf"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "no valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "'a' maps to 3"),
        ('{"weight_map": {"a": "../s.safetensors"}}', "which is no file name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"1 files that are not there: gone\.saf"),
        ('{"weight_map": {"z": "s.safetensors"}}', r"not in the file it says: z \(in s\.saf"),
    ],
)
def test_bad_index(index: str, reason: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "s.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(tmp_path)


def test_index_that_swaps_two_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    a, b = index["weight_map"]["a"], index["weight_map"]["b"]
    index["weight_map"] = {"a": b, "b": a}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not in the file it says: a"):
        Checkpoint.open(tmp_path)


def test_file_that_changes_after_opening(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4000), "b": torch.zeros(4000)}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.tensor("a")
    with path.open("r+b") as file:
        file.truncate(20000)
    with pytest.raises(CheckpointError, match="changed its size"):
        checkpoint.tensor("b")
    path.unlink()
    with pytest.raises(CheckpointError, match="changed its size"):
        checkpoint.tensor("a")


def test_has_mtp(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    trunk = {n: t for n, t in hub.items() if not n.startswith("model.layers.3.")}
    assert Checkpoint.open(write_single(tmp_path / "all", hub)).has_mtp(spec)
    assert not Checkpoint.open(write_single(tmp_path / "trunk", trunk)).has_mtp(spec)
    trunk["model.layers.3.embed_tokens.weight"] = torch.zeros(1)
    trunk["model.layers.30.enorm.weight"] = torch.zeros(1)
    assert not Checkpoint.open(write_single(tmp_path / "copies", trunk)).has_mtp(spec)
