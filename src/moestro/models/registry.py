"""From ModelSpec to a model with unfilled parameters."""

from moestro.core.model_spec import ModelSpec
from moestro.errors import UnsupportedError
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.hy_v3 import HyV3ForCausalLM
from moestro.models.qwen3_moe import Qwen3MoeForCausalLM

_MODELS: dict[str, type[HyV3ForCausalLM] | type[Qwen3MoeForCausalLM]] = {
    "hy_v3": HyV3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


def build_model(
    spec: ModelSpec, parameters: Parameters, num_mtp_layers: int | None = None
) -> CausalLM:
    """The model of spec.model_type, its parameters allocated by `parameters` but not filled.

    num_mtp_layers: how many MTP layers to allocate, by default all that the spec promises; 0 for
    a checkpoint that lacks them. Raises UnsupportedError for another model_type.
    """
    if spec.model_type not in _MODELS:
        raise UnsupportedError(
            f"model_type {spec.model_type!r} is not supported; supported: {', '.join(_MODELS)}."
        )
    mtp = spec.num_mtp_layers if num_mtp_layers is None else num_mtp_layers
    if not 0 <= mtp <= spec.num_mtp_layers:
        raise UnsupportedError(
            f"num_mtp_layers must be in [0, {spec.num_mtp_layers}] for this checkpoint, got {mtp}."
        )
    return _MODELS[spec.model_type](parameters, spec, mtp)
