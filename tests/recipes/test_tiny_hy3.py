"""The recipe end to end on a very small model: data, training, resuming, export, loading."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes.tiny_hy3 import prepare_data, train
from recipes.tiny_hy3.evaluate import evaluate, load_model
from recipes.tiny_hy3.export import export
from recipes.tiny_hy3.muon import orthogonalize
from recipes.tiny_hy3.run_state import load_state, save_state
from recipes.tiny_hy3.schedule import Schedule
from recipes.tiny_hy3.trainer import Trainer
from recipes.tiny_hy3.windows import Windows
from tests.fakes.parameters import tensors_of
from tokenizers import Tokenizer

from moestro.core.model_config import load_model_spec
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model

HELDOUT = Path(__file__).parents[1] / "data" / "tiny_hy3_heldout.npz"
SMALL = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "expert_hidden_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty files that look like a library, one unreadable, one too short."""
    folder = tmp_path_factory.mktemp("library")
    for i in range(20):
        lines = [f"def name_{i}_{j}(value):\n    return value + {j * 7919 % 997}\n\n"
                 for j in range(60)]  # fmt: skip
        (folder / f"module_{i}.py").write_text("".join(lines))
    (folder / "latin.py").write_bytes(b"# \xe9\n" * 100)
    (folder / "short.py").write_text("x = 1\n")
    return folder


@pytest.fixture(scope="module")
def data(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "data"
    argv = [str(folder), f"--library={library}", "--vocab-size=280", "--context=256"]
    prepare_data.prepare(prepare_data.parse_args(argv))
    return folder


@pytest.fixture(scope="module")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    config = json.loads((resolve_model("tiny-hy3") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL))
    return folder


def small_trainer(data: Path, small_config: Path, total: int = 4096) -> Trainer:
    windows = Windows.open(data, seed=0)
    schedule = Schedule(total, tokens_per_step=256, max_length=64)
    return Trainer(load_model_spec(small_config), windows, schedule, 3e-3, torch.float32)


def train_args(data: Path, run: Path, *extra: str) -> list[str]:
    return [str(data), str(run), "--tokens=1024", "--tokens-per-step=256", "--max-length=64",
            "--precision=float32", "--report-every=1", *extra]  # fmt: skip


def test_data_folder(data: Path, library: Path) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["train_files"] + manifest["heldout_files"] == 20
    assert manifest["vocab_size"] == 280
    held = np.load(data / "heldout.npz")
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    text = (library / str(held["files"][0])).read_text()
    assert held["ids"].tolist() == [1, *tokenizer.encode(text, add_special_tokens=False).ids, 2]
    training = tokenizer.decode(np.load(data / "train.npy").tolist())
    assert text[:40] not in training
    with pytest.raises(SystemExit, match="exists already"):
        prepare_data.prepare(prepare_data.parse_args([str(data)]))


def test_named_files_are_held_out(library: Path, data: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "held.npz", files=np.array(["module_3.py", "module_5.py"]))
    folder = tmp_path / "data"
    argv = [str(folder), f"--library={library}", "--tokenizer-of=tiny-hy3",
            f"--heldout-of={tmp_path / 'held.npz'}"]  # fmt: skip
    prepare_data.prepare(prepare_data.parse_args(argv))
    assert np.load(folder / "heldout.npz")["files"].tolist() == ["module_3.py", "module_5.py"]
    bundled = Tokenizer.from_file(str(resolve_model("tiny-hy3") / "tokenizer.json"))
    written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert written.get_vocab() == bundled.get_vocab()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == json.loads(
        (resolve_model("tiny-hy3") / "tokenizer_config.json").read_text()
    )


def test_recall_lines_are_answered(data: Path) -> None:
    windows = Windows.open(data, seed=3)
    text = [windows.tokenizer.decode(row.tolist()) for row in windows.batch(0, 40, 200)]
    asked = 0
    for row in text:
        for line in row.splitlines():
            if line.startswith("#? "):
                asked += 1
                assert f"#: {line[3:]}" in row.splitlines()
    assert asked > 3
    again = Windows.open(data, seed=3).batch(0, 40, 200)
    assert torch.equal(windows.batch(0, 40, 200), again)
    assert not torch.equal(windows.batch(1, 40, 200), again)


def test_resumed_run_is_the_undisturbed_one(data: Path, small_config: Path, tmp_path: Path) -> None:
    straight = small_trainer(data, small_config)
    reports = [straight.train_step() for _ in range(6)]
    assert reports[-1].loss < reports[0].loss
    first = small_trainer(data, small_config)
    for _ in range(3):
        first.train_step()
    save_state(tmp_path, first.state())
    second = small_trainer(data, small_config)
    second.restore(load_state(tmp_path))
    assert [second.train_step() for _ in range(3)] == reports[3:]
    left, right = straight.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(left[n], right[n]) for n in left)


def test_expert_bias_follows_the_load(data: Path, small_config: Path) -> None:
    trainer = small_trainer(data, small_config)
    trainer.train_step()
    for layer in trainer.model.moe_layers():
        even = 1 / len(layer.last_load)
        assert torch.equal(layer.expert_bias.sign(), (even - layer.last_load).sign())
        assert not layer.expert_bias.requires_grad


def test_signal_saves_and_resume_finishes(
    data: Path, small_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    plain = Trainer.train_step

    def interrupted(self: Trainer) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    heldout = np.load(data / "heldout.npz")["ids"]
    before = signal.getsignal(signal.SIGTERM)
    args = train.parse_args(train_args(data, run, f"--config={small_config}"))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        train.run(train.build_trainer(args), args, heldout)
    assert signal.getsignal(signal.SIGTERM) is before
    assert load_state(run)["step"] == 1
    with pytest.raises(SystemExit, match="holds a run already"):
        train.build_trainer(args)
    with pytest.raises(SystemExit, match=r"started with --lr 0\.003"):
        train.build_trainer(train.parse_args(train_args(data, run, "--resume", "--lr=1")))
    args = train.parse_args(train_args(data, run, "--resume"))
    train.run(train.build_trainer(args), args, heldout)
    state = load_state(run)
    assert state["step"] == 4
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "grad_norm" in m] == [1, 2, 3, 4]
    check_export(data, run, out, state["model"])


def check_export(data: Path, run: Path, out: Path, trained: dict[str, torch.Tensor]) -> None:
    result = export(data, run, out, window=128)
    model = build_model(load_model_spec(out), Parameters(torch.bfloat16))
    assert load_weights(model.spec, model.weights, out).notes == ()
    for name, parameter in tensors_of(model.weights).items():
        # What the engine keeps in fp32 comes from bf16 too, the bias excepted.
        stored = trained[name] if name.endswith("expert_bias") else trained[name].bfloat16()
        assert torch.equal(parameter, stored.to(parameter.dtype)), name
    card = (out / "CARD.md").read_text()
    assert f"loss {result.loss:.4f}" in card
    assert "$" not in card
    with pytest.raises(SystemExit, match="exists already"):
        export(data, run, out)


def test_continuing_starts_near_the_shipped_loss(library: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "held.npz", files=np.array(["module_3.py"]))
    data = tmp_path / "data"
    argv = [str(data), f"--library={library}", "--tokenizer-of=tiny-hy3",
            f"--heldout-of={tmp_path / 'held.npz'}"]  # fmt: skip
    prepare_data.prepare(prepare_data.parse_args(argv))
    args = train.parse_args(train_args(data, tmp_path / "run", "--from-weights=tiny-hy3"))
    trainer = train.build_trainer(args)
    result = evaluate(trainer.model, np.load(HELDOUT)["ids"], window=2048, max_windows=3)
    assert result.loss == pytest.approx(2.0287, abs=0.35)
    assert result.mtp_loss < result.loss + 0.2
    assert result.mtp_agreement > 0.7
    report = trainer.train_step()
    assert report.step == 1
    assert np.isfinite(report.loss)


def test_wrong_vocabulary_is_refused(data: Path, small_config: Path, tmp_path: Path) -> None:
    config = json.loads((small_config / "config.json").read_text()) | {"vocab_size": 270}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = train.parse_args(train_args(data, tmp_path / "run", f"--config={tmp_path}"))
    with pytest.raises(SystemExit, match="has 280 token ids, the model 270"):
        train.build_trainer(args)


def test_damaged_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to resume"):
        load_state(tmp_path)
    (tmp_path / "state.pt").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(SystemExit, match="can't be read"):
        load_state(tmp_path)


def test_failed_save_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, {"step": 1})

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_state(tmp_path, {"step": 2})
    assert load_state(tmp_path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_full_disk_keeps_the_old_state(tmp_path: Path) -> None:
    save_state(tmp_path, {"step": 1})
    (tmp_path / "state.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path, {"step": 2, "weights": torch.zeros(100_000)})
    assert load_state(tmp_path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_training_model_is_the_serving_model_of_the_bundled_weights() -> None:
    """Every parameter the engine has, under the same name and shape."""
    folder = resolve_model("tiny-hy3")
    model = build_model(load_model_spec(folder), Parameters(torch.float32))
    serving = tensors_of(model.weights)
    training = load_model(folder).state_dict()
    assert {n: t.shape for n, t in serving.items()} == {n: t.shape for n, t in training.items()}


@pytest.mark.parametrize("shape", [(3, 24, 8), (3, 8, 24), (16, 16)])
def test_orthogonalize(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
    assert values.max() < 1.4
    assert values.median() > 0.6


def test_schedule() -> None:
    schedule = Schedule(total_tokens=1_000_000, tokens_per_step=4096, max_length=8192)
    shapes = [schedule.batch_shape(int(s * 1e6)) for s in (0, 0.5, 0.9, 0.96, 0.99, 1.5)]
    assert shapes == [(16, 256), (8, 512), (4, 1024), (1, 4096), (1, 8192), (1, 8192)]
    factors = [schedule.lr_factor(int(s * 1e6)) for s in (0, 0.3, 0.75, 0.999, 2)]
    assert 0 < factors[0] < 0.2
    assert factors[1:] == pytest.approx([1, 0.5, 0.02, 0.02])
    assert schedule.balance_rate(0) > 0 == schedule.balance_rate(950_000)
