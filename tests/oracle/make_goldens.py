"""Make the goldens: logits and greedy tokens of HF transformers on tiny random models.

Runs in a virtual environment of its own that has transformers >= 5.24 and torch:

    python -m tests.oracle.make_goldens                              # the committed goldens
    python -m tests.oracle.make_goldens --cases F --out DIR --full   # cases from a JSON file

What HF does otherwise, and what follows from it:
- It adds the experts' outputs in index order, rounded to the model's dtype; we in order of choice,
  in fp32.
- It rounds logits to the model's dtype whatever enable_lm_head_fp32 says; we never do.
- It rounds cos, sin, and the normed value before the norm's weight, to the model's dtype.
- Its Qwen3-MoE router multiplies in the model's dtype and rounds the weights to it; ours is fp32.
In fp32 all of it vanishes in 1e-4. In bf16 it is why ours must be the nearer to HF's fp32.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.oracle.configs import CONFIGS, OracleCase
from tests.oracle.divergence import mean_kl
from tests.oracle.prompts import GREEDY_TOKENS, probes_of, prompts_of, text_of
from tests.oracle.weights import draw_tensor

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
FP32_NAMES = ("mlp.gate.weight", "e_score_correction_bias")
"""What HF keeps in fp32 when it loads hy_v3 in bf16."""


def build(case: OracleCase, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    """HF's model with the drawn weights."""
    config = transformers.AutoConfig.for_model(**case.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    drawn = {n: torch.from_numpy(draw_tensor(n, s, case.seed)) for n, s in shapes.items()}
    if case.config["tie_word_embeddings"]:
        drawn["lm_head.weight"] = drawn["model.embed_tokens.weight"]
    model.load_state_dict(drawn)
    model = model.to(dtype).eval()
    if case.config["model_type"] == "hy_v3":
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(FP32_NAMES):
                tensor.data = drawn[name].clone()
    return model


def logits_of(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    """token_ids: [S, L] or [L]; logits [tokens, V] in fp32."""
    ids = torch.from_numpy(np.atleast_2d(token_ids))
    logits = model(input_ids=ids, use_cache=False).logits
    return logits.float().flatten(0, 1).numpy()


def greedy(model: torch.nn.Module, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuation, every step computed afresh, and its top-2 gaps of the logits."""
    ids = prompt.tolist()
    gaps = []
    for _ in range(GREEDY_TOKENS):
        logits = logits_of(model, np.array(ids))[-1]
        second, first = np.sort(logits)[-2:]
        gaps.append(first - second)
        ids.append(int(logits.argmax()))
    return np.array(ids[len(prompt) :], dtype=np.int32), np.array(gaps, dtype=np.float32)


@torch.inference_mode()
def golden(case: OracleCase, full: bool) -> dict[str, np.ndarray]:
    """What the tests compare with.

    logits [positions, V] over the prompts; greedy_tokens and greedy_gaps; over the text: at each
    position log(sum(exp(logits))) and one probed logit, and the mean KL of HF's bf16 models from
    its fp32 one, for the modelling code as written and for what a user gets by default. full adds
    text_logits [positions, V], too large to commit.
    """
    exact = build(case, torch.float32, **EAGER)
    text = text_of(case)
    teacher = logits_of(exact, text)
    students = [logits_of(build(case, torch.bfloat16, **o), text) for o in (EAGER, {})]
    tokens, gaps = greedy(exact, prompts_of(case)[0])
    made = {
        "logits": np.concatenate([logits_of(exact, p) for p in prompts_of(case)]),
        "greedy_tokens": tokens,
        "greedy_gaps": gaps,
        "text_logsumexp": torch.from_numpy(teacher).double().logsumexp(-1).float().numpy(),
        "text_probes": teacher[np.arange(len(teacher)), probes_of(case)],
        "bf16_kl": np.array([mean_kl(teacher, s) for s in students]),
    }
    if full:
        made["text_logits"] = teacher
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, help="JSON list of {name, config, seed}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "goldens")
    parser.add_argument("--full", action="store_true", help="keep all logits of the text")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cases = CONFIGS
    if args.cases:
        cases = tuple(OracleCase(**c) for c in json.loads(args.cases.read_text()))
    args.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        made = golden(case, args.full)
        np.savez_compressed(args.out / f"{case.name}.npz", **made)
        print(case.name, "bf16 KL", made["bf16_kl"], "least gap", made["greedy_gaps"].min())


if __name__ == "__main__":
    main()
