"""Checkpoint tensors into a model's parameters, one at a time.

Memory beyond the parameters: floats are not copied to anonymous memory on the way (one tensor at
most, when a writer left its data unaligned), what is quantised or packed takes a block of rows and
a tensor's scales; a tensor's mapped pages are dropped once it is used.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moestro.backends.base import Device
from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import HEAD, WeightFormat
from moestro.errors import CheckpointError
from moestro.layers.parameters import Parameter
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.name_map import NameMap, Placement, RowCopy, uses_old_hunyuan_names
from moestro.weights.name_summary import summarize_names
from moestro.weights.stored import OpenWeight, StoredWeight, StoredWeights
from moestro.weights.writer import WeightWriter

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

LOADABLE_DTYPES = ("F32", "BF16", "F16")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read. num_bytes: of the checkpoint tensors used; notes: what the user may wonder."""

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


def load_weights(
    spec: ModelSpec,
    parameters: Mapping[str, Parameter],
    model_dir: Path,
    progress: Progress | None = None,
    *,
    backend: Device | None = None,
) -> LoadReport:
    """Fill every parameter from the folder; backend: the device that packed ones are packed for.

    Values are converted to the parameters' formats: float weights are quantised, quantised ones
    are taken as they are. Raises CheckpointError, before anything is written, naming every
    missing, unexpected, misshapen, repeated or unsupported tensor; and, naming the tensor, when a
    value overflows float16, or a scale or quantised value is NaN.
    """
    num_mtp = _built_mtp_layers(spec, parameters)
    threads = torch.get_num_threads()
    with Checkpoint.open(model_dir) as checkpoint, WeightWriter(backend, threads) as writer:
        assignment = _Assignment(checkpoint, NameMap(spec, num_mtp), spec)
        if spec.tie_word_embeddings and HEAD in parameters:
            assignment.copy_head(spec)
        assignment.raise_problems(parameters)
        _check_tied_head(checkpoint, spec)
        total = sum(assignment.num_bytes(name) for name in assignment.placements)
        done = 0
        for name, placement in assignment.placements.items():
            stored = assignment.stored.by_name[name]
            source = OpenWeight(checkpoint, stored)
            for copy in placement.copies:
                writer.copy(name, source, parameters[copy.parameter], copy)
            for tensor in stored.tensors:
                checkpoint.release(tensor)
            done += assignment.num_bytes(name)
            if progress is not None:
                progress(done, total)
        notes = tuple(_notes(checkpoint, spec, num_mtp, assignment))
        for note in notes:
            logger.info("%s: %s", model_dir, note)
        files = tuple(path.name for path in checkpoint.files)
        return LoadReport(files, len(assignment.placements), total, notes)


def stored_formats(
    checkpoint: Checkpoint, spec: ModelSpec, num_mtp_layers: int
) -> dict[str, WeightFormat | None]:
    """The format each parameter has in a quantised checkpoint, None for a float one.

    Tensors that can't be placed are left to load_weights to report. Raises CheckpointError when
    parts of one parameter differ.
    """
    if spec.quantization is None:
        return {}
    assignment = _Assignment(checkpoint, NameMap(spec, num_mtp_layers), spec)
    found: dict[str, dict[WeightFormat | None, str]] = {}
    for name, placement in assignment.placements.items():
        stored = assignment.stored.by_name[name]
        if stored.shape not in placement.shapes:
            continue
        weight_format = stored.format
        for copy in placement.copies:
            found.setdefault(copy.parameter, {}).setdefault(weight_format, name)
    mixed = [
        f"{parameter}: " + ", ".join(f"{name} is {f or 'float'}" for f, name in formats.items())
        for parameter, formats in found.items()
        if len(formats) > 1
    ]
    if mixed and not assignment.stored.problems:
        raise CheckpointError(
            f"{checkpoint.model_dir}: parts of one weight are stored in different formats, which "
            "is not supported: quantise or ignore them together\n  " + "\n  ".join(mixed[:20])
        )
    return {
        parameter: next((f for f in formats if f is not None), None)
        for parameter, formats in found.items()
    }


class _Assignment:
    """Every checkpoint tensor judged: placed, ignored, or a problem."""

    def __init__(self, checkpoint: Checkpoint, name_map: NameMap, spec: ModelSpec) -> None:
        self.checkpoint = checkpoint
        self.name_map = name_map
        self.stored = StoredWeights(checkpoint, spec.quantization)
        self.placements: dict[str, Placement] = {}
        self.old_hunyuan = uses_old_hunyuan_names(checkpoint.names())
        self._unexpected: list[str] = []
        self._misshapen: list[str] = []
        self._dtypes: dict[str, list[str]] = {}
        self._repeated: list[str] = []
        self._filled: dict[str, str] = {}
        self.extra_parameters: frozenset[str] = frozenset()
        for name, stored in self.stored.by_name.items():
            tied = spec.tie_word_embeddings and name == HEAD
            if not tied and not name_map.ignored(name):
                self._judge(name, stored)

    def num_bytes(self, name: str) -> int:
        """Bytes of the checkpoint tensors that hold a weight."""
        return sum(self.checkpoint.num_bytes(t) for t in self.stored.by_name[name].tensors)

    def copy_head(self, spec: ModelSpec) -> None:
        """Let the embedding table fill a head of its own too."""
        self.extra_parameters = frozenset([HEAD])
        placement = self.placements.get(_EMBEDDING)
        if placement is not None:
            copy = RowCopy(0, HEAD, None, 0, spec.vocab_size)
            self.placements[_EMBEDDING] = replace(placement, copies=(*placement.copies, copy))

    def _judge(self, name: str, stored: StoredWeight) -> None:
        shape = stored.shape
        placement = self.name_map.place(name, shape, self.old_hunyuan)
        if placement is None:
            self._unexpected.append(name)
            return
        for part in placement.parts:
            if part in self._filled:
                self._repeated.append(f"{name} (same weights as {self._filled[part]})")
                break
            self._filled[part] = name
        dtype = self.checkpoint.dtype(stored.codes)
        if stored.scheme is None and dtype not in LOADABLE_DTYPES:
            self._dtypes.setdefault(dtype, []).append(name)
        if shape not in placement.shapes:
            wanted = " or ".join(str(list(s)) for s in placement.shapes)
            self._misshapen.append(f"{name} is {list(shape)}, the config asks for {wanted}")
        self.placements[name] = placement

    def _of_other_formats(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Quantised weights that go to parameters of another format."""
        wrong = []
        for name, placement in self.placements.items():
            stored = self.stored.by_name[name]
            if stored.scheme is None or stored.shape not in placement.shapes:
                continue
            for copy in placement.copies:
                built = _format_of(parameters.get(copy.parameter))
                if built != stored.format:
                    found = f"{name} is {stored.format}"
                    wrong.append(f"{found}, {copy.parameter} is {built or 'a float tensor'}")
                    break
        return wrong

    def raise_problems(self, parameters: Mapping[str, Parameter]) -> None:
        """Raise one CheckpointError for all that is wrong, if anything is."""
        parts = self.name_map.parts
        missing = [self.name_map.display_name(p) for p in parts if p not in self._filled]
        known = {p.parameter for p in parts.values()} | self.extra_parameters
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
        sections += [(what, names, summarize_names(names)) for what, names in self.stored.problems]
        unfit = self._of_other_formats(parameters)
        sections.append(("of a format that the model was not built for", unfit, unfit[:20]))
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


def _format_of(parameter: Parameter | None) -> WeightFormat | None:
    if parameter is None or isinstance(parameter, torch.Tensor):
        return None
    return parameter.format


def _built_mtp_layers(spec: ModelSpec, parameters: Mapping[str, Parameter]) -> int:
    layers = range(spec.num_hidden_layers, spec.num_hidden_layers + spec.num_mtp_layers)
    return sum(f"model.layers.{i}.eh_proj.weight" in parameters for i in layers)


def _check_tied_head(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    names = checkpoint.names()
    if not spec.tie_word_embeddings or HEAD not in names:
        return
    head, table = checkpoint.tensor(HEAD), checkpoint.tensor(_EMBEDDING)
    same = head.dtype == table.dtype and head.shape == table.shape
    same = same and torch.equal(head.view(torch.uint8), table.view(torch.uint8))
    checkpoint.release(HEAD)
    checkpoint.release(_EMBEDDING)
    if not same:
        raise CheckpointError(
            f"{checkpoint.model_dir}: tie_word_embeddings is true, but {HEAD} differs from "
            f"{_EMBEDDING}: set it to false in config.json, or delete the tensor"
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
    if assignment.stored.unused:
        count = len(assignment.stored.unused)
        yield f"{count} scales of activations or of cached keys and values are not used"
    if assignment.old_hunyuan:
        yield "old Hunyuan names: qkv_proj is interleaved by KV head, gate_and_up_proj up first"
