"""HF transformers on the held-out text of tiny-hy3; prints one JSON object.

Runs in the same virtual environment as make_goldens, which tells what it needs:

    python -m tests.oracle.hf_tiny_hy3 MODEL_DIR > tests/oracle/goldens/tiny_hy3.json

perplexity and window_nll: fp32, all windows. greedy_tokens and greedy_gaps (top-2 gaps of the
logits): fp32, after heldout_prompt. bf16_kl: mean KL of the bf16 model from the fp32 one on
judged_window; --logits FILE keeps the fp32 logits there.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tests.oracle.divergence import mean_kl
from tests.oracle.heldout import (
    heldout_prompt,
    heldout_windows,
    judged_window,
    perplexity,
    window_nll,
)
from tests.oracle.make_goldens import greedy, logits_of


def load(model_dir: Path, dtype: torch.dtype) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--logits", type=Path, help="where to keep the judged window's logits")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = load(args.model_dir, torch.float32)
    sums = [window_nll(torch.from_numpy(logits_of(model, w)), w) for w in heldout_windows()]
    tokens, gaps = greedy(model, heldout_prompt())
    teacher = logits_of(model, judged_window())
    student = logits_of(load(args.model_dir, torch.bfloat16), judged_window())
    if args.logits:
        np.save(args.logits, teacher)
    found = {
        "perplexity": perplexity(sums),
        "bf16_kl": mean_kl(teacher, student),
        "greedy_tokens": tokens.tolist(),
        "greedy_gaps": [round(float(gap), 6) for gap in gaps],
        "window_nll": sums,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
