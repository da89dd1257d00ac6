"""A model with drawn weights under the Hub's names, and a sequence that drafts by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.oracle.configs import hy_v3
from tests.oracle.driver import PagedLoop
from tests.oracle.weights import draw_tensor
from tests.speculative.hy3_float64 import Hy3Float64

from moestro import ops
from moestro.backends import load_backend
from moestro.backends.base import GraphPool
from moestro.core.model_config import parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.layers.moe import pack_routers
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.registry import build_model
from moestro.speculative.drafter import ComputedStep, DraftedSequence
from moestro.speculative.mtp import MTPDrafter
from moestro.weights.loader import load_weights
from moestro.weights.name_map import NameMap

VOCAB = 200


def mtp_spec(num_mtp_layers: int = 1, **changes: Any) -> ModelSpec:
    return parse_model_config(
        hy_v3(num_nextn_predict_layers=num_mtp_layers, vocab_size=VOCAB, **changes)
    )


def hub_tensors(spec: ModelSpec, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint."""
    name_map = NameMap(spec, spec.num_mtp_layers)
    names = {name_map.display_name(name): part for name, part in name_map.parts.items()}
    return {name: draw_tensor(name, tuple(part.shape), seed) for name, part in names.items()}


def drawn(
    spec: ModelSpec, seed: int, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, Hy3Float64]:
    """The model, loaded from a checkpoint in `folder`, and its transcription."""
    tensors = hub_tensors(spec, seed)
    save_file({n: torch.from_numpy(t) for n, t in tensors.items()}, folder / "model.safetensors")
    return loaded(spec, folder, dtype), Hy3Float64(lambda n: tensors[n].astype(np.float64), spec)


def loaded(spec: ModelSpec, folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """As an engine loads it, its weights packed for the kernels."""
    device = load_backend("cpu")
    model = build_model(spec, Parameters(dtype, backend=device))
    load_weights(spec, model.weights, folder, backend=device)
    pack_routers(model, device, dtype)
    return model


@contextmanager
def draft_logits(model: CausalLM) -> Iterator[list[torch.Tensor]]:
    """The logits that a drafter's model computes meanwhile, row after row."""
    rows: list[torch.Tensor] = []
    compute = model.compute_logits

    def told(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden_states)
        rows.extend(logits.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "compute_logits", told)
        yield rows


@dataclass
class Bench:
    """Sequences of one PagedLoop, and a drafter that sees every step of theirs.

    tokens[s]: known of sequence s; loop.lengths[s] of them are computed.
    """

    model: CausalLM
    num_sequences: int = 1
    max_len: int = 96
    page_size: int = 4
    graph_pool: GraphPool | None = None
    max_logits_rows: int = 64
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.num_sequences)]
        self.loop = PagedLoop(self.model, self.num_sequences, self.max_len, self.page_size)
        self.drafter = MTPDrafter(
            self.model,
            self.loop.kv_pages,
            max_num_seqs=self.num_sequences,
            page_table_width=self.loop.page_table.shape[1],
            max_logits_rows=self.max_logits_rows,
            graph_pool=self.graph_pool,
        )

    def step(
        self,
        runs: Sequence[Sequence[int]],
        behind: Sequence[int | None],
        wanted: Sequence[int],
        rejected: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:
        """Compute runs[s] more tokens of each sequence (none: it is not in the step).

        behind[s]: the token that its last kept row drew, or None for one that samples nothing, and
        then its prompt goes on with tokens[s]. rejected[s]: rows at the end whose drafts were
        wrong. Returns the drafts of every sequence.
        """
        rejected = rejected or [0] * len(runs)
        active = [s for s, run in enumerate(runs) if run]
        starts = [self.loop.lengths[s] for s in active]
        counts = [len(runs[s]) for s in active]
        positions, whole = self.loop.metadata(starts, counts)
        # metadata speaks of the loop's first sequences: lay out those that are here
        owner = torch.repeat_interleave(torch.tensor(active), torch.tensor(counts))
        pages = self.loop.page_table[owner, positions // self.page_size].long()
        attention = ops.AttentionMetadata(
            whole.query_start_loc,
            whole.seq_lens,
            self.loop.page_table[active],
            pages * self.page_size + positions % self.page_size,
            whole.max_query_len,
            whole.max_seq_len,
        )
        ids = [t for s in active for t in runs[s]]
        with torch.inference_mode():
            hidden = self.model(torch.tensor(ids), positions, self.loop.kv_pages, attention)
        next_ids, sequences, row = [], [], 0
        for s, start, count in zip(active, starts, counts, strict=True):
            kept = count - rejected[s]
            run, drew = list(runs[s]), behind[s]
            follows = self.tokens[s][start + count] if drew is None else drew
            shown = [*run[1:kept], follows, *run[kept:]]
            next_ids += shown[:count]
            self.loop.lengths[s] = start + kept
            if drew is not None:
                known = [*self.tokens[s][:start], *run[:kept], drew]
                self.tokens[s] = known
                sequences.append(
                    DraftedSequence(
                        s,
                        np.array(known, np.int64),
                        row + kept - 1,
                        self.loop.page_table[s].numpy(),
                        wanted[s],
                    )
                )
            row += count
        step = ComputedStep(hidden, torch.tensor(next_ids), positions, attention, sequences)
        found = dict(zip([q.seq_id for q in sequences], self.drafter.propose(step), strict=True))
        return [found.get(s, ()) for s in range(self.num_sequences)]


def text(count: int, seed: int = 3, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(vocab, size=count).tolist()


def chain(
    model: CausalLM,
    tokens: list[int],
    count: int,
    cuts: tuple[int, ...] = (),
    page_size: int = 4,
) -> list[int]:
    """Drafts behind tokens, the prompt computed in chunks that end at `cuts`."""
    bench = Bench(model, page_size=page_size)
    bench.tokens[0] = list(tokens)
    known = len(tokens) - 1
    begin = 0
    for end in (*cuts, known):
        last = tokens[-1] if end == known else None
        found = bench.step([tokens[begin:end]], [last], [count if end == known else 0])
        begin = end
    return list(found[0])
