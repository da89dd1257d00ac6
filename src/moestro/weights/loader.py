"""Checkpoint tensors into a model's parameters, one at a time.

Memory beyond the parameters: nothing is copied to anonymous memory on the way (one tensor at most,
when a writer left its data unaligned), and a tensor's mapped pages are dropped once it is copied.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moestro.core.model_spec import ModelSpec
from moestro.errors import CheckpointError
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.name_map import NameMap, Placement, RowCopy, uses_old_hunyuan_names
from moestro.weights.name_summary import summarize_names

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

LOADABLE_DTYPES = ("F32", "BF16", "F16")
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read. num_bytes: of the checkpoint tensors used; notes: what the user may wonder."""

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


def load_weights(model: nn.Module, model_dir: Path, progress: Progress | None = None) -> LoadReport:
    """Fill every parameter of the model (attribute spec: ModelSpec) from the folder.

    Values are converted to the parameters' dtypes. Raises CheckpointError, before anything is
    written, naming every missing, unexpected, misshapen, repeated or unsupported tensor; and when
    a value overflows float16.
    """
    spec = model.spec
    assert isinstance(spec, ModelSpec)
    parameters = model.state_dict()
    num_mtp = _built_mtp_layers(spec, parameters)
    with Checkpoint.open(model_dir) as checkpoint:
        assignment = _Assignment(checkpoint, NameMap(spec, num_mtp), spec)
        assignment.raise_problems(parameters)
        _check_tied_head(checkpoint, spec)
        total = sum(checkpoint.num_bytes(name) for name in assignment.placements)
        done = 0
        for name, placement in assignment.placements.items():
            _copy(checkpoint, name, placement, parameters)
            done += checkpoint.num_bytes(name)
            if progress is not None:
                progress(done, total)
        notes = tuple(_notes(checkpoint, spec, num_mtp, assignment))
        for note in notes:
            logger.info("%s: %s", model_dir, note)
        files = tuple(path.name for path in checkpoint.files)
        return LoadReport(files, len(assignment.placements), total, notes)


class _Assignment:
    """Every checkpoint tensor judged: placed, ignored, or a problem."""

    def __init__(self, checkpoint: Checkpoint, name_map: NameMap, spec: ModelSpec) -> None:
        self.checkpoint = checkpoint
        self.name_map = name_map
        self.placements: dict[str, Placement] = {}
        self.old_hunyuan = uses_old_hunyuan_names(checkpoint.names())
        self._unexpected: list[str] = []
        self._misshapen: list[str] = []
        self._dtypes: dict[str, list[str]] = {}
        self._repeated: list[str] = []
        self._filled: dict[str, str] = {}
        for name in checkpoint.names():
            tied = spec.tie_word_embeddings and name == _TIED_HEAD
            if not tied and not name_map.ignored(name):
                self._judge(name)

    def _judge(self, name: str) -> None:
        shape = self.checkpoint.shape(name)
        placement = self.name_map.place(name, shape, self.old_hunyuan)
        if placement is None:
            self._unexpected.append(name)
            return
        for part in placement.parts:
            if part in self._filled:
                self._repeated.append(f"{name} (same weights as {self._filled[part]})")
                break
            self._filled[part] = name
        dtype = self.checkpoint.dtype(name)
        if dtype not in LOADABLE_DTYPES:
            self._dtypes.setdefault(dtype, []).append(name)
        if shape not in placement.shapes:
            wanted = " or ".join(str(list(s)) for s in placement.shapes)
            self._misshapen.append(f"{name} is {list(shape)}, the config asks for {wanted}")
        self.placements[name] = placement

    def raise_problems(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise one CheckpointError for all that is wrong, if anything is."""
        parts = self.name_map.parts
        missing = [self.name_map.display_name(p) for p in parts if p not in self._filled]
        known = {p.parameter for p in parts.values()}
        unknown, absent = sorted(parameters.keys() - known), sorted(known - parameters.keys())
        sections = [
            ("missing", missing, summarize_names(missing)),
            ("unexpected", self._unexpected, summarize_names(self._unexpected)),
            ("of a wrong shape", self._misshapen, summarize_names(self._misshapen)),
            ("given twice", self._repeated, summarize_names(self._repeated)),
        ]
        sections += [
            (f"of dtype {dtype} (this build loads {', '.join(LOADABLE_DTYPES)})", names,
             summarize_names(names))
            for dtype, names in self._dtypes.items()
        ]  # fmt: skip
        sections += [
            ("needed by the model but unknown to the name map", unknown, summarize_names(unknown)),
            ("needed by the name map but not in the model", absent, summarize_names(absent)),
        ]
        texts = [
            f"{len(names)} tensors {what}:\n  " + "\n  ".join(lines)
            for what, names, lines in sections
            if names
        ]
        if texts:
            raise CheckpointError(
                f"{self.checkpoint.model_dir}: the weights don't fit config.json\n"
                + "\n".join(texts)
            )


def _built_mtp_layers(spec: ModelSpec, parameters: Mapping[str, torch.Tensor]) -> int:
    layers = range(spec.num_hidden_layers, spec.num_hidden_layers + spec.num_mtp_layers)
    return sum(f"model.layers.{i}.eh_proj.weight" in parameters for i in layers)


def _check_tied_head(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    names = checkpoint.names()
    if not spec.tie_word_embeddings or _TIED_HEAD not in names:
        return
    head, table = checkpoint.tensor(_TIED_HEAD), checkpoint.tensor(_EMBEDDING)
    same = head.dtype == table.dtype and head.shape == table.shape
    same = same and torch.equal(head.view(torch.uint8), table.view(torch.uint8))
    checkpoint.release(_TIED_HEAD)
    checkpoint.release(_EMBEDDING)
    if not same:
        raise CheckpointError(
            f"{checkpoint.model_dir}: tie_word_embeddings is true, but {_TIED_HEAD} differs from "
            f"{_EMBEDDING}: set it to false in config.json, or delete the tensor"
        )


def _copy(
    checkpoint: Checkpoint,
    name: str,
    placement: Placement,
    parameters: Mapping[str, torch.Tensor],
) -> None:
    source = checkpoint.tensor(name)
    for copy in placement.copies:
        target = _target(parameters, copy)
        rows = source.view(-1, *target.shape[1:])[copy.source : copy.source + copy.num_rows]
        target.copy_(rows)
        if target.dtype == torch.float16 != source.dtype:
            _check_float16(name, rows, target)
    checkpoint.release(name)


def _target(parameters: Mapping[str, torch.Tensor], copy: RowCopy) -> torch.Tensor:
    parameter = parameters[copy.parameter]
    whole = parameter if copy.expert is None else parameter[copy.expert]
    return whole[copy.start : copy.start + copy.num_rows]


def _check_float16(name: str, rows: torch.Tensor, target: torch.Tensor) -> None:
    low, high = target.aminmax()
    if torch.isinf(low) or torch.isinf(high):
        low, high = rows.aminmax()
        raise CheckpointError(
            f"tensor {name!r} reaches {max(-low.item(), high.item()):g}, above float16's 65504: "
            "use dtype bfloat16 or float32"
        )


def _notes(
    checkpoint: Checkpoint, spec: ModelSpec, num_mtp: int, assignment: _Assignment
) -> Iterator[str]:
    if spec.num_mtp_layers and not num_mtp:
        if checkpoint.has_mtp(spec):
            yield "the MTP layer was left out"
        else:
            yield (
                f"no MTP layer: the config promises {spec.num_mtp_layers}, the checkpoint has none"
            )
    if assignment.old_hunyuan:
        yield "old Hunyuan names: qkv_proj is interleaved by KV head, gate_and_up_proj up first"
