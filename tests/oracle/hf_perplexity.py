"""HF transformers on the held-out text of tiny-hy3, in fp32; prints one JSON object.

Runs in the same virtual environment as make_goldens, which tells what it needs:

    python -m tests.oracle.hf_perplexity MODEL_DIR > tests/oracle/goldens/tiny_hy3.json
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from tests.oracle.heldout import heldout_windows, perplexity, window_nll


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model_dir, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    sums = []
    for window in heldout_windows():
        logits = model(input_ids=torch.from_numpy(window)[None], use_cache=False).logits[0]
        sums.append(window_nll(logits, window))
    print(json.dumps({"perplexity": perplexity(sums), "window_nll": sums}))


if __name__ == "__main__":
    main()
