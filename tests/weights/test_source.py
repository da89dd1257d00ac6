"""A model's name becomes a folder, or a message that says what to do."""

import sys
import types
from pathlib import Path

import pytest

from moestro.errors import CheckpointError, ConfigError
from moestro.weights.source import bundled_models, resolve_model


def test_bundled_model_is_complete() -> None:
    folder = resolve_model("tiny-hy3")
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "CARD.md",
    } <= names
    assert "tiny-hy3" in bundled_models()


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "m")) == tmp_path / "m"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m") == Path("m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m") == tmp_path / "m"


def test_bundled_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-hy3").mkdir()
    (tmp_path / "tiny-hy3" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny-hy3").is_absolute()
    assert resolve_model("./tiny-hy3") == Path("tiny-hy3")


@pytest.mark.parametrize(
    "name", ["", "no-such-model", "a/b/c", "/nowhere/at/all", "x\0y", "x" * 5000]
)
def test_missing_name_lists_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tiny-hy3.*folder.*Hub id"):
        resolve_model(name)


def test_an_unknown_home_folder() -> None:
    with pytest.raises(ConfigError, match="'~nobody-of-that-name/model' begins with a home folder"):
        resolve_model("~nobody-of-that-name/model")


def test_file_and_wrong_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file: give the folder"):
        resolve_model(str(file))
    with pytest.raises(CheckpointError, match=r"no config\.json among its 1 entries \(model\.saf"):
        resolve_model(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="the folder is empty"):
        resolve_model(str(tmp_path / "empty"))


def test_hub_id_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'moestro\[hub\]'"):
        resolve_model("tencent/Hy3")


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    assert resolve_model("tencent/Hy3") == tmp_path
    assert resolve_model("tencent/Hy3", with_weights=False) == tmp_path
    assert [("*.safetensors" in patterns) for _, patterns in calls] == [True, False]


def test_offline_failure_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host\nlong trace")

    fake_hub(monkeypatch, download)
    with pytest.raises(ConfigError, match=r"'a/b'.*OSError: no route to host\. Check") as info:
        resolve_model("a/b")
    assert "\n" not in str(info.value)
