"""Training sequences: random windows of the corpus, some with recall lines.

A recall line `#: name = 1234` stands somewhere in the code and is asked for at the end as
`#? name = 1234`: the model learns to look far back. A step's batch depends on the seed and the
step's number only.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

_WORDS = (
    "alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "limit", "offset",
    "port", "token", "width", "height", "depth", "count", "index", "retry", "timeout", "budget",
    "weight", "score", "level", "stage", "batch", "queue", "cache", "frame", "layer", "shard",
)  # fmt: skip
_RECALL_SHARE = 0.10
_MAX_RECALLS = 6

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Draws batches from the token ids of the training files."""

    ids: NDArray[np.uint16]
    tokenizer: Tokenizer
    seed: int

    @classmethod
    def open(cls, data: Path, seed: int) -> "Windows":
        """data: a folder written by prepare_data."""
        ids = np.load(data / "train.npy", mmap_mode="r")
        return cls(ids, Tokenizer.from_file(str(data / "tokenizer.json")), seed)

    def batch(self, step: int, sequences: int, length: int) -> torch.Tensor:
        """[sequences, length + 1] int64."""
        if length + 1 > len(self.ids):
            raise SystemExit(
                f"the corpus has {len(self.ids)} tokens, too few for a window of {length + 1}"
            )
        random = np.random.default_rng([self.seed, step])
        rows = []
        for _ in range(sequences):
            start = int(random.integers(0, len(self.ids) - length))
            row = self.ids[start : start + length + 1].astype(np.int64)
            rows.append(self._with_recalls(row, random))
        return torch.from_numpy(np.stack(rows))

    def _with_recalls(self, row: Ids, random: np.random.Generator) -> Ids:
        if random.random() >= _RECALL_SHARE:
            return row
        count = int(random.integers(1, _MAX_RECALLS + 1))
        facts = [
            (f"{a}_{b}", int(random.integers(1000, 10000)))
            for a, b in (random.choice(_WORDS, 2, replace=False) for _ in range(count))
        ]
        facts = list(dict(facts).items())
        told = [self._encode(f"\n#: {name} = {value}\n") for name, value in facts]
        asked = [
            self._encode(f"\n#? {name} = {value}\n")
            for name, value in (facts[i] for i in random.permutation(len(facts)))
        ]
        room = len(row) - sum(map(len, told)) - sum(map(len, asked))
        if room < len(told):
            return row
        cuts = sorted(random.integers(0, room, len(told)).tolist())
        pieces: list[Ids] = []
        for start, stop, line in zip([0, *cuts[:-1]], cuts, told, strict=True):
            pieces += [row[start:stop], line]
        return np.concatenate([*pieces, row[cuts[-1] : room], *asked])

    def _encode(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
