"""A run's state on disk: one file, replaced whole, so a kill at any moment leaves a good one."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_FILE = "state.pt"


def save_state(run: Path, state: Mapping[str, Any]) -> None:
    """Write the state beside the old one and swap. Raises OSError (disk full) with the old kept."""
    partial = run / f"{_FILE}.partial"
    data = io.BytesIO()  # torch.save hides what goes wrong with a file
    torch.save(dict(state), data)
    try:
        with partial.open("wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(run / _FILE)
    finally:
        partial.unlink(missing_ok=True)


def load_state(run: Path) -> dict[str, Any]:
    """The last saved state. SystemExit when there is none, or it can't be read."""
    path = run / _FILE
    if not path.is_file():
        raise SystemExit(f"{path}: nothing to resume; start without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise SystemExit(f"{path}: can't be read ({error}); it is damaged") from error
    return state
