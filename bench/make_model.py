#!/usr/bin/env python
"""Write a checkpoint with random weights, for measuring speed and memory.

The defaults are the Qwen3-MoE of docs/benchmarks.md: 16 layers of 1024, 64 experts of 384, top-8,
1.3 billion parameters, bf16. Names, config.json and tokenizer are what both Moestro and HF
transformers read. Each tensor's values depend on the seed and its name alone, so the same
arguments give the same model whatever the shard size. One shard is held in memory at a time. Needs
the safetensors library, which comes with `pip install '.[test]'`.

    python bench/make_model.py /tmp/bench-model
    python bench/make_model.py /tmp/hy3 --model-type hy_v3 --num-layers 5 --num-experts 32
"""

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from moestro.core.model_config import parse_model_config
from moestro.errors import MoestroError
from moestro.weights.name_map import NameMap

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BIAS_STD = 0.05
"""Large enough, against sigmoid scores around 0.5, to change which experts are chosen."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="where to write; must not exist, or be empty")
    add("--model-type", choices=("qwen3_moe", "hy_v3"), default="qwen3_moe")
    add("--hidden-size", type=int, default=1024)
    add("--num-layers", type=int, default=16)
    add("--num-heads", type=int, default=16)
    add("--num-kv-heads", type=int, default=4)
    add("--head-dim", type=int, default=128)
    add("--num-experts", type=int, default=64)
    add("--top-k", type=int, default=8)
    add("--moe-intermediate-size", type=int, default=384)
    add("--num-shared-experts", type=int, default=1, help="hy_v3 only")
    add("--num-mtp-layers", type=int, default=1, help="hy_v3 only")
    add("--intermediate-size", type=int, default=2048, help="of dense layers: hy_v3's first")
    add("--vocab-size", type=int, default=32768, help="at least 259: specials and bytes")
    add("--max-position-embeddings", type=int, default=32768)
    add("--tie-word-embeddings", action="store_true")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--std", type=float, default=0.02, help="of the normal distribution of the weights")
    add("--seed", type=int, default=0)
    add("--shard-bytes", type=int, default=1_000_000_000, help="a new file beyond so many")
    return parser.parse_args(argv)


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json of the model that the arguments describe."""
    config: dict[str, Any] = {
        "model_type": args.model_type,
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "moe_intermediate_size": args.moe_intermediate_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "num_experts": args.num_experts,
        "num_experts_per_tok": args.top_k,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_position_embeddings,
        "tie_word_embeddings": args.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": args.std,
        "output_router_logits": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": args.dtype,
    }
    return config | (_hy_v3_keys(args) if args.model_type == "hy_v3" else _qwen3_keys())


def _qwen3_keys() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "router_aux_loss_coef": 0.001,
    }


def _hy_v3_keys(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["HYV3ForCausalLM"],
        "expert_hidden_dim": args.moe_intermediate_size,
        "num_shared_experts": args.num_shared_experts,
        "num_nextn_predict_layers": args.num_mtp_layers,
        "first_k_dense_replace": 1,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "route_norm": True,
        "qk_norm": True,
        "router_scaling_factor": 2.826,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "mlp_bias": False,
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "enable_attention_fp32_softmax": False,
    }


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level: every text encodes to its bytes, every id decodes (fillers to ` w<id>`)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [PAD, BOS, EOS, *letters]
    if vocab_size < len(words):
        raise SystemExit(f"make_model: --vocab-size {vocab_size} is below {len(words)}")
    words += [f"\u0120w{i}" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 1)]
    )
    return tokenizer


def make_tensors(
    config: Mapping[str, Any], std: float, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hub name, made when asked for: norms 1, the rest normal."""
    spec = parse_model_config(config)
    name_map = NameMap(spec, spec.num_mtp_layers)
    for part_name, part in name_map.parts.items():
        name = name_map.display_name(part_name)
        is_bias = name.endswith("expert_bias")
        tensor = torch.empty(part.shape, dtype=torch.float32 if is_bias else DTYPES[spec.dtype])
        if len(part.shape) == 1 and not is_bias:
            yield name, tensor.fill_(1)
            continue
        # The generator keeps 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        yield name, tensor.normal_(0, BIAS_STD if is_bias else std, generator=generator)


def write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int, progress: Progress
) -> None:
    """Files of about shard_bytes, then their index under final names."""
    task = progress.add_task("writing", total=None)
    files: list[tuple[Path, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        path = folder / f"shard-{len(files)}"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)
        files.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        progress.update(task, advance=tensor.nbytes, description=f"{total / 1e9:.2f} GB")
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, (path, names) in enumerate(files, 1):
        final = f"model-{i:05}-of-{len(files):05}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def make_model(args: argparse.Namespace) -> Path:
    """The whole folder. It appears under its name only when complete."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"make_model: {folder} exists already; remove it or name another")
    config = make_config(args)
    tokenizer = make_tokenizer(args.vocab_size)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
        _write_json(partial / "config.json", config)
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        _write_json(partial / "generation_config.json", special | {"do_sample": False})
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(args))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            tensors = make_tensors(config, args.std, args.seed)
            write_shards(partial, tensors, args.shard_bytes, progress)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _tokenizer_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": args.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    args = parse_args()
    try:
        folder = make_model(args)
    except (MoestroError, OSError, SafetensorError) as error:
        sys.exit(f"make_model: {error}")
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{folder}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
