"""Held-out loss and MTP agreement of an exported model, in fp32.

python -m recipes.tiny_hy3.evaluate tiny-hy3 --heldout tests/data/tiny_hy3_heldout.npz
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from recipes.tiny_hy3.model import TrainingModel
from torch.nn import functional

from moestro.core.model_config import load_model_spec
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss and mtp_loss in nats a token; mtp_agreement: share of positions where the MTP layer's
    argmax is the trunk's next argmax."""

    loss: float
    perplexity: float
    mtp_loss: float
    mtp_agreement: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: TrainingModel,
    ids: NDArray[np.uint16],
    window: int = 2048,
    max_windows: int | None = None,
) -> Evaluation:
    """Over windows that don't see each other; within one, every token but the first counts.

    max_windows takes so many, evenly spread.
    """
    whole = len(ids) // window
    count = whole if max_windows is None else min(whole, max_windows)
    if count == 0:
        raise SystemExit(f"{len(ids)} held-out tokens are less than one window of {window}")
    trunk = ahead = agreed = 0.0
    for i in range(count):
        start = i * whole // count * window
        row = torch.from_numpy(ids[start : start + window].astype(np.int64))
        logits, mtp_logits = (x[0].float() for x in model(row[None]))
        trunk += functional.cross_entropy(logits[:-1], row[1:], reduction="sum").item()
        ahead += functional.cross_entropy(mtp_logits[:-1], row[2:], reduction="sum").item()
        agreed += (logits[1:].argmax(-1) == mtp_logits.argmax(-1)).sum().item()
    loss = trunk / (count * (window - 1))
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss),
        mtp_loss=ahead / (count * (window - 2)),
        mtp_agreement=agreed / (count * (window - 1)),
        num_tokens=count * window,
    )


def load_model(folder: Path) -> TrainingModel:
    """The training model filled from a checkpoint folder, in fp32."""
    model = TrainingModel(load_model_spec(folder))
    load_weights(model.spec, model.state_dict(), folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a bundled name or a folder")
    parser.add_argument("--heldout", type=Path, required=True, help="an .npz with ids")
    parser.add_argument("--window", type=int, default=2048)
    args = parser.parse_args()
    model = load_model(resolve_model(args.model)).eval()
    result = evaluate(model, np.load(args.heldout)["ids"], args.window)
    print(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
