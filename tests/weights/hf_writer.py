"""Run by the python of MOESTRO_PEERS_PYTHON: HF transformers saves a model in two spellings.

argv: folder. Writes <folder>/<model_type>-saved (save_pretrained) and -memory (the state dict as
HF holds it: outer names, stacked experts).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import HYV3Config, HYV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 10,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def main(folder: Path) -> None:
    for config, family in (
        (HYV3Config(**SMALL, num_shared_experts=2), HYV3ForCausalLM),
        (Qwen3MoeConfig(**SMALL, mlp_only_layers=[0]), Qwen3MoeForCausalLM),
    ):
        torch.manual_seed(0)
        model = family(config).to(torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
        model.save_pretrained(folder / f"{config.model_type}-saved", max_shard_size="4KB")
        memory = folder / f"{config.model_type}-memory"
        memory.mkdir()
        state = {n: t.clone().contiguous() for n, t in model.state_dict().items()}
        save_file(state, memory / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
