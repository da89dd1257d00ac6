"""Write data/hf_*.json: what transformers itself makes of configs of both families.

Run with a Python that has transformers >= 5.24: `python tests/core/make_hf_configs.py`. The
hub_*.json files beside them hold the values of the published checkpoints.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import HYV3Config, Qwen3MoeConfig

DATA = Path(__file__).parent / "data"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}


def saved(config: Any) -> dict[str, Any]:
    """config.json as save_pretrained writes it."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        written: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return written


def main() -> None:
    """Write every file."""
    hub_hy3 = json.loads((DATA / "hub_hy3.json").read_text())
    hub_qwen = json.loads((DATA / "hub_qwen3_30b_a3b.json").read_text())
    made = {
        "hy_v3_class_default": HYV3Config().to_dict(),
        "qwen3_moe_class_default": Qwen3MoeConfig().to_dict(),
        "hy_v3_saved": saved(HYV3Config()),
        "qwen3_moe_saved": saved(Qwen3MoeConfig()),
        "hy_v3_tiny_saved": saved(HYV3Config(**TINY, eos_token_id=[2, 3], dtype="float32")),
        "qwen3_moe_tiny_yarn_saved": saved(
            Qwen3MoeConfig(**TINY, rope_parameters=YARN, mlp_only_layers=[1], dtype="bfloat16")
        ),
        "hy_v3_hub_resaved": saved(HYV3Config(**hub_hy3)),
        "qwen3_moe_hub_resaved": saved(Qwen3MoeConfig(**hub_qwen)),
    }
    for name, config in made.items():
        (DATA / f"hf_{name}.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
