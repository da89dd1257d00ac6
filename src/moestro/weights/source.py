"""Where a model lives: a bundled name, a folder, or a Hub id becomes a folder."""

import importlib
import os
import re
from pathlib import Path

from moestro.errors import CheckpointError, ConfigError, shown

_BUNDLED_ROOT = Path(__file__).resolve().parent.parent / "bundled"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_JSON_FILES = ("*.json", "*.jinja")
_ALL_FILES = (*_JSON_FILES, "*.safetensors")


def bundled_models() -> tuple[str, ...]:
    """Names of the models that ship inside the package."""
    if not _BUNDLED_ROOT.is_dir():
        return ()
    return tuple(sorted(p.parent.name for p in _BUNDLED_ROOT.glob("*/config.json")))


def resolve_model(name: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: it exists and holds a config.json.

    A bundled name wins over a folder of that name; write ./NAME for the folder. A Hub id
    (owner/name) is fetched with huggingface_hub, through its own cache; with_weights=False fetches
    the JSON files only. Raises ConfigError (no such model, can't fetch) and CheckpointError (a
    folder that is no checkpoint).
    """
    if not name or "\0" in name:
        raise ConfigError(f"model {shown(name)} is no name: give {_choices()}")
    if name in bundled_models():
        return _BUNDLED_ROOT / name
    path = user_path(name)
    if _is_dir(path):
        return _checked_folder(path)
    if os.path.lexists(path):
        raise ConfigError(f"model {shown(name)} is a file: give the folder that holds it")
    if _HUB_ID.fullmatch(name):
        return _checked_folder(_fetch(name, _ALL_FILES if with_weights else _JSON_FILES))
    raise ConfigError(f"model {shown(name)} does not exist: give {_choices()}")


def user_path(text: str) -> Path:
    """A path as a user writes it, with ~ for a home folder. Raises ConfigError."""
    if not text.startswith("~"):
        return Path(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{shown(text)} begins with a home folder that is not known here: write the path out"
        ) from None


def _choices() -> str:
    names = ", ".join(bundled_models()) or "none in this installation"
    return f"a bundled model ({names}), a folder, or a Hub id (owner/name)"


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _checked_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    try:
        entries = sorted(p.name for p in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    if not entries:
        raise CheckpointError(f"{path}: the folder is empty, no config.json")
    shown = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
    raise CheckpointError(f"{path}: no config.json among its {len(entries)} entries ({shown})")


def _fetch(hub_id: str, patterns: tuple[str, ...]) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"model {shown(hub_id)} is no folder here and, as a Hub id, needs huggingface_hub: "
            f"pip install 'moestro[hub]', or give {_choices()}"
        ) from error
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except Exception as error:
        # The library raises classes of its own, of its HTTP client and of the operating system.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "no reason given"
        raise ConfigError(
            f"model {shown(hub_id)} is no folder here and can't be fetched from the Hub: "
            f"{type(error).__name__}: {reason}. Check the name, the network and HF_TOKEN, "
            f"or give {_choices()}"
        ) from error
