"""Which format each weight gets: what the checkpoint holds, what the user asks for."""

from collections.abc import Mapping

from moestro.config import EngineConfig
from moestro.core.matrices import matrices
from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import GROUP_SIZES, HEAD, WeightFormat, WeightFormats
from moestro.errors import ConfigError

Stored = Mapping[str, WeightFormat | None]
"""Formats found in a quantised checkpoint's headers by parameter; None is a float tensor."""


def choose_weight_formats(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: str,
    num_mtp_layers: int,
    stored: Stored | None = None,
) -> tuple[WeightFormats, tuple[str, ...]]:
    """The formats and the notes for the user.

    stored: what the checkpoint's headers say; None when only its config.json was read. Raises
    ConfigError: quantization given for a checkpoint that is quantised otherwise, or a group size
    that does not divide a weight's columns.
    """
    if spec.quantization is not None:
        return _stored_formats(spec, config, dtype, num_mtp_layers, stored)
    plain = WeightFormat(dtype)
    wanted = config.quantization
    if wanted == "none":
        return WeightFormats(plain, plain, plain), ()
    if wanted == "fp8":
        note = "weights are rounded to fp8 at load, one scale a row; lm_head stays as it is"
        return WeightFormats(plain, WeightFormat("fp8"), plain), (note,)
    head = WeightFormat("w8a8")
    linear = head if wanted == "w8a8" else WeightFormat("w4a8", config.quantization_group_size)
    formats = WeightFormats(plain, linear, head)
    _check_groups(spec, formats, num_mtp_layers)
    note = f"weights are rounded to {linear} at load, lm_head to w8a8 (one scale a row)"
    return formats, (note,)


def _check_groups(spec: ModelSpec, formats: WeightFormats, num_mtp_layers: int) -> None:
    for matrix in matrices(spec, num_mtp_layers):
        size, columns = formats.of(matrix.name).group_size, matrix.shape[-1]
        if size and columns % size:
            fitting = [str(g) for g in GROUP_SIZES if columns % g == 0]
            use = f"quantization_group_size={' or '.join(fitting)} or " if fitting else ""
            raise ConfigError(
                f"quantization_group_size={size} does not divide the {columns} columns of "
                f"{matrix.name}. Use {use}quantization='w8a8'."
            )


def _stored_formats(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: str,
    num_mtp_layers: int,
    stored: Stored | None,
) -> tuple[WeightFormats, tuple[str, ...]]:
    assert spec.quantization is not None
    plain = WeightFormat(dtype)
    found: dict[str, WeightFormat] = {}
    notes = list(spec.quantization.notes)
    unlike = 0
    for matrix in matrices(spec, num_mtp_layers):
        scheme = spec.quantization.scheme_of(matrix.module)
        said = plain if scheme is None else scheme.format_for(matrix.shape[-1])
        is_ = (stored[matrix.name] or plain) if stored and matrix.name in stored else said
        unlike += not said.is_float and is_.is_float
        found[matrix.name] = is_
    if unlike:
        notes.append(
            f"{unlike} weights that config.json calls quantised are {spec.dtype} in the files, and "
            f"are kept in {dtype}"
        )
    linear = _most_common([f for name, f in found.items() if name != HEAD and not f.is_float])
    formats = WeightFormats(plain, linear or plain, found.get(HEAD, plain))
    wanted = config.quantization
    if wanted not in ("none", (linear or plain).name):
        raise ConfigError(
            f"quantization={wanted!r}, but the checkpoint is quantised already, to {linear}: use "
            "quantization='none', or quantise a float checkpoint."
        )
    return formats.with_exceptions(found), tuple(dict.fromkeys(notes))


def _most_common(formats: list[WeightFormat]) -> WeightFormat | None:
    return max(formats, key=formats.count) if formats else None
