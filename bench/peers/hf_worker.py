"""HF transformers as a benchmark worker, with line_protocol.py's commands.

Runs in an environment of its own (no moestro there).
"""

import argparse
import sys
import time

import torch
import transformers
from line_protocol import serve


class Worker:
    """A loaded model and the two measurements."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.vocab = self.model.config.vocab_size

    def prompt(self, batch: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(10, self.vocab, (batch, tokens), generator=generator)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> dict[str, float]:
        ids = self.prompt(1, tokens)
        began = time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        out.logits.argmax().item()
        return {"seconds": time.perf_counter() - began}

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Greedy decode after an untimed prefill."""
        out = self.model(self.prompt(batch, context), use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.cache
        began = time.perf_counter()
        for _ in range(steps):
            out = self.model(token, cache=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            token.tolist()
        return {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    worker = Worker(args.folder, args.threads)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    serve(worker, versions, sys.stdout)


if __name__ == "__main__":
    main()
