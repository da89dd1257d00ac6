"""The same random weights written in every spelling the loader accepts."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from moestro.core.model_spec import ModelSpec, MoeSpec, RopeSpec
from moestro.weights.name_map import NameMap

Tensors = dict[str, torch.Tensor]


def tiny_spec(model_type: str = "hy_v3", **changes: object) -> ModelSpec:
    """Three layers, the first dense; every dimension a different number."""
    hy = model_type == "hy_v3"
    moe = MoeSpec(
        num_experts=5,
        num_experts_per_tok=2,
        intermediate_size=6,
        num_shared_experts=2 if hy else 0,
        scoring="sigmoid" if hy else "softmax",
        has_expert_bias=hy,
        renormalize=True,
        renormalize_epsilon=1e-20 if hy else 0.0,
        scaling=2.826 if hy else 1.0,
        fp32_combine=False,
    )
    values: dict[str, object] = {
        "model_type": model_type,
        "vocab_size": 19,
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "moe": moe,
        "moe_layers": (False, True, True),
        "num_mtp_layers": 1 if hy else 0,
        "rms_norm_eps": 1e-5,
        "rope": RopeSpec(theta=10000.0),
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_ids": (2,),
    }
    return ModelSpec(**{**values, **changes})  # type: ignore[arg-type]


def hub_tensors(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensors:
    """Separate projections, experts one by one, the names the Hub uses for this model_type."""
    name_map = NameMap(spec, spec.num_mtp_layers)
    generator = torch.Generator().manual_seed(seed)
    return {
        name_map.display_name(name): torch.randn(part.shape, generator=generator).to(
            torch.float32 if name.endswith("expert_bias") else dtype
        )
        for name, part in name_map.parts.items()
    }


def outer_names(hub: Tensors) -> Tensors:
    """HF's in-memory names, experts still one by one."""
    result = {}
    for name, tensor in hub.items():
        name = name.replace("router.gate", "gate").replace("shared_mlp", "shared_experts")
        result[name.replace("mlp.expert_bias", "mlp.e_score_correction_bias")] = tensor
    return result


def merge(tensors: Tensors, leaves: tuple[str, ...], fused: str, skip: str = "") -> Tensors:
    """Concatenate sibling tensors along their rows."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(leaves[0]) and not (skip and skip in name):
            stem = name.removesuffix(leaves[0])
            result[stem + fused] = torch.cat([result.pop(stem + leaf) for leaf in leaves])
    return result


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
GATE_UP = ("gate_proj.weight", "up_proj.weight")


def stacked_experts(tensors: Tensors) -> Tensors:
    """experts.gate_up_proj [E, 2I, N] and experts.down_proj [E, N, I]."""
    result = {n: t for n, t in tensors.items() if ".experts." not in n}
    layers = {n.split("experts.")[0] + "experts." for n in tensors if ".experts." in n}
    for layer in sorted(layers):
        count = 1 + max(int(n.removeprefix(layer).split(".")[0]) for n in tensors if layer in n)
        of = [{k: tensors[f"{layer}{e}.{k}_proj.weight"] for k in ("gate", "up", "down")}
              for e in range(count)]  # fmt: skip
        result[layer + "gate_up_proj"] = torch.stack([torch.cat((t["gate"], t["up"])) for t in of])
        result[layer + "down_proj"] = torch.stack([t["down"] for t in of])
    return result


def interleaved_qkv(tensors: Tensors, spec: ModelSpec, *, four_dimensional: bool) -> Tensors:
    """qkv_proj [G, H/G + 2, D, N]: for each KV head its query heads, its k, its v."""
    result = dict(tensors)
    heads, groups, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    for name in tensors:
        if not name.endswith(QKV[0]):
            continue
        stem = name.removesuffix(QKV[0])
        q, k, v = (result.pop(stem + leaf) for leaf in QKV)
        q = q.view(groups, heads // groups, dim, -1)
        k, v = k.view(groups, 1, dim, -1), v.view(groups, 1, dim, -1)
        fused = torch.cat((q, k, v), dim=1).contiguous()
        result[stem + "qkv_proj.weight"] = fused if four_dimensional else fused.flatten(0, 2)
    return result


def old_hunyuan(hub: Tensors, spec: ModelSpec) -> Tensors:
    """mlp.gate.wg, gate_and_up_proj (up first), 2-D interleaved qkv_proj."""
    tensors = interleaved_qkv(hub, spec, four_dimensional=False)
    tensors = merge(tensors, GATE_UP[::-1], "gate_and_up_proj.weight")
    return {
        n.replace("router.gate.", "gate.wg.").replace("mlp.gate.weight", "mlp.gate.wg.weight"): t
        for n, t in tensors.items()
    }


Spelling = Callable[[Tensors, ModelSpec], Tensors]

SPELLINGS: dict[str, Spelling] = {
    "hub": lambda t, spec: t,
    "outer": lambda t, spec: outer_names(t),
    "outer_stacked": lambda t, spec: stacked_experts(outer_names(t)),
    "hub_stacked": lambda t, spec: stacked_experts(t),
    "fused_qkv": lambda t, spec: merge(t, QKV, "qkv_proj.weight"),
    "fused_gate_up": lambda t, spec: merge(t, GATE_UP, "gate_up_proj.weight"),
    "fused_dense_only": lambda t, spec: merge(t, GATE_UP, "gate_up_proj.weight", skip="experts."),
    "all_fused": lambda t, spec: merge(
        merge(stacked_experts(outer_names(t)), QKV, "qkv_proj.weight"),
        GATE_UP,
        "gate_up_proj.weight",
    ),
    "interleaved_4d": lambda t, spec: interleaved_qkv(t, spec, four_dimensional=True),
    "old_hunyuan": old_hunyuan,
}


def write_single(folder: Path, tensors: Tensors) -> Path:
    """model.safetensors alone (the loader reads no config.json)."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, shards: list[Tensors]) -> Path:
    """model-0000i-of-0000n.safetensors and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, tensors in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(t.nbytes for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
