"""Run by the python of MOESTRO_PEERS_PYTHON: vLLM drafts with a checkpoint's MTP layer.

Arguments: a checkpoint, a JSON list of prompt tokens, how many tokens to draft a step, how many to
say, where to keep the draft logits [drafts, V] (npy). stdout's last line: JSON of the tokens said.
Exit status 3 without vLLM.
"""

import importlib.util
import json
import os
import sys

if importlib.util.find_spec("vllm") is None:
    sys.exit(3)

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
from vllm import LLM, SamplingParams
from vllm.model_executor.models.hy_v3_mtp import HYV3MTP


def main() -> None:
    folder, prompt, num_drafts, num_tokens, kept = sys.argv[1:]
    rows = []
    compute = HYV3MTP.compute_logits

    def told(self, *args, **options):  # type: ignore[no-untyped-def]
        logits = compute(self, *args, **options)
        rows.append(logits.float().numpy().copy())
        return logits

    HYV3MTP.compute_logits = told
    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": int(num_drafts)},
    )
    rows.clear()  # of its own warm-up
    params = SamplingParams(
        temperature=0.0, max_tokens=int(num_tokens), ignore_eos=True, detokenize=False
    )
    done = llm.generate([{"prompt_token_ids": json.loads(prompt)}], params)
    np.save(kept, np.concatenate(rows))
    print(json.dumps(list(done[0].outputs[0].token_ids)))


main()
