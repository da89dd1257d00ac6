"""A module that has a model's parameter names and nothing else."""

import torch
from torch import nn

from moestro.core.model_spec import ModelSpec


class ParameterHolder(nn.Module):
    """Parameters as named by the models, written out by hand and filled with NaN.

    It is independent of the name map on purpose: the two must agree.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, num_mtp_layers: int | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        n = spec.hidden_size
        self.add("model.embed_tokens.weight", spec.vocab_size, n)
        self.add("model.norm.weight", n)
        if not spec.tie_word_embeddings:
            self.add("lm_head.weight", spec.vocab_size, n)
        for i, is_moe in enumerate(spec.moe_layers):
            self.add_layer(f"model.layers.{i}.", is_moe)
        mtp = spec.num_mtp_layers if num_mtp_layers is None else num_mtp_layers
        for i in range(spec.num_hidden_layers, spec.num_hidden_layers + mtp):
            self.add_layer(f"model.layers.{i}.", True)
            for norm in ("enorm", "hnorm", "final_layernorm"):
                self.add(f"model.layers.{i}.{norm}.weight", n)
            self.add(f"model.layers.{i}.eh_proj.weight", n, 2 * n)

    def add_layer(self, layer: str, is_moe: bool) -> None:
        spec, n, d = self.spec, self.spec.hidden_size, self.spec.head_dim
        heads, groups = spec.num_attention_heads, spec.num_key_value_heads
        self.add(layer + "input_layernorm.weight", n)
        self.add(layer + "post_attention_layernorm.weight", n)
        self.add(layer + "self_attn.qkv_proj.weight", (heads + 2 * groups) * d, n)
        self.add(layer + "self_attn.o_proj.weight", n, heads * d)
        self.add(layer + "self_attn.q_norm.weight", d)
        self.add(layer + "self_attn.k_norm.weight", d)
        mlp, moe = layer + "mlp.", spec.moe
        if not is_moe or moe is None:
            self.add(mlp + "gate_up_proj.weight", 2 * spec.intermediate_size, n)
            self.add(mlp + "down_proj.weight", n, spec.intermediate_size)
            return
        e, i, j = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
        self.add(mlp + "gate.weight", e, n, dtype=torch.float32)
        if moe.has_expert_bias:
            self.add(mlp + "expert_bias", e, dtype=torch.float32)
        self.add(mlp + "experts.gate_up_proj", e, 2 * i, n)
        self.add(mlp + "experts.down_proj", e, n, i)
        if moe.num_shared_experts:
            self.add(mlp + "shared_experts.gate_up_proj.weight", 2 * j, n)
            self.add(mlp + "shared_experts.down_proj.weight", n, j)

    def add(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        module: nn.Module = self
        *path, leaf = name.split(".")
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        data = torch.full(shape, float("nan"), dtype=dtype or self.dtype)
        module.register_parameter(leaf, nn.Parameter(data, requires_grad=False))
