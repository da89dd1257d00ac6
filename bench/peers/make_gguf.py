#!/usr/bin/env python
"""Convert a checkpoint folder of make_model.py to GGUF for llama.cpp: BF16, Q8_0 and Q4_0.

    python bench/peers/make_gguf.py PEERS_DIR CHECKPOINT OUT_DIR

Writes OUT_DIR/bf16.gguf with llama.cpp's own converter, then q8_0.gguf and q4_0.gguf with its own
quantiser and its --pure, which quantises the embedding and the output layer too. The tokenizer of
a random model is none that the converter knows, and has no merges, which llama.cpp insists on: it
is taken for GPT-2's and given one merge, which changes nothing that is timed. PEERS_DIR is what
install.py filled.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONVERT = """
import runpy, sys
source = sys.argv.pop(1)
sys.path[:0] = [source, source + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import gguf
load = gguf.SpecialVocab.__init__
def load_with_a_merge(self, *args, **kwargs):
    load(self, *args, **kwargs)
    self.merges = self.merges or ["\\u0120 w"]
gguf.SpecialVocab.__init__ = load_with_a_merge
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def run(*command: str | Path) -> None:
    """One command; SystemExit with the command when it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    if subprocess.run(words, check=False).returncode:
        raise SystemExit(f"make_gguf: failed: {' '.join(words)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, metavar="PEERS_DIR")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    args = parser.parse_args()
    llama = json.loads((args.peers / "peers.json").read_text())["llama.cpp"]
    args.out.mkdir(parents=True, exist_ok=True)
    plain = args.out / "bf16.gguf"
    if not plain.exists():
        partial = args.out / "partial.gguf"
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(CONVERT)
            script.flush()
            told = ("--outtype", "bf16", "--outfile", partial, args.checkpoint)
            run(llama["python"], script.name, llama["source"], *told)
        partial.rename(plain)
    for kind in ("q8_0", "q4_0"):
        target = args.out / f"{kind}.gguf"
        if not target.exists():
            partial = args.out / "partial.gguf"
            run(llama["worker"][0], "--quantize", plain, partial, kind)
            partial.rename(target)
    for path in sorted(args.out.glob("*.gguf")):
        print(f"{path}: {path.stat().st_size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
