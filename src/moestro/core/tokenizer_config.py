"""What stands beside tokenizer.json: tokenizer_config.json and the older special_tokens_map.json.

Only the shapes are checked here; what the tokens mean is the tokenizer's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestro.core.model_config import read_json_object
from moestro.errors import CheckpointError, shown

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Both files as one object; {} without them.

    Raises CheckpointError: broken files, a token that is neither text nor an object with its text
    as content, added_tokens_decoder with keys that are no ids.
    """
    config: dict[str, Any] = {}
    for name in _FILES:
        path = folder / name
        if path.exists():
            found = read_json_object(path)
            _check_tokens(found, path)
            config.update(found)
    return config


def token_text(value: object) -> str | None:
    """The text of a token in these files: a string, or an object that describes one."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def added_tokens(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """added_tokens_decoder by id, in the order of the ids."""
    entries = config.get("added_tokens_decoder") or {}
    return dict(sorted((int(key), entry) for key, entry in entries.items()))


def listed_tokens(config: Mapping[str, Any]) -> list[Any]:
    """The further special tokens, under either name."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    return list(extra.values()) if isinstance(extra, Mapping) else list(extra)


def _check_tokens(found: Mapping[str, Any], path: Path) -> None:
    for name in NAMED_TOKENS:
        if found.get(name) is not None:
            _require(_is_token(found[name]), found[name], f"{path}: {name} must be one token")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = found.get(name)
        if extra is not None:
            is_good = isinstance(extra, list | dict) and all(map(_is_token, _values(extra)))
            _require(is_good, extra, f"{path}: {name} must be a list of tokens")
    added = found.get("added_tokens_decoder")
    if added is not None:
        is_good = isinstance(added, dict) and all(map(_is_entry, added.values()))
        _require(is_good, added, f"{path}: added_tokens_decoder must map ids to tokens")
        for key in added:
            is_id = key.isascii() and key.isdigit() and len(key) < 10
            _require(is_id, key, f"{path}: added_tokens_decoder must have ids as keys")


def _values(extra: list[Any] | dict[str, Any]) -> list[Any]:
    return extra if isinstance(extra, list) else list(extra.values())


def _is_token(value: object) -> bool:
    return isinstance(value, str) or _is_entry(value)


def _is_entry(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _require(holds: bool, value: object, constraint: str) -> None:
    if not holds:
        raise CheckpointError(f"{constraint}, got {shown(value)}.")
