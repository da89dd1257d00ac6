"""The corpus: the standard library of the Python that runs this.

    python -m recipes.tiny_hy3.prepare_data data/
    python -m recipes.tiny_hy3.prepare_data data/ --tokenizer-of tiny-hy3 \\
        --heldout-of tests/data/tiny_hy3_heldout.npz       (to continue from the shipped weights)

Writes train.npy (uint16 ids), heldout.npz (ids, files), the tokenizer's files and manifest.json.
Each file becomes <|bos|>, its text, <|eos|>.
"""

import argparse
import json
import platform
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moestro.errors import MoestroError
from moestro.weights.source import resolve_model

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>")
_BOS, _EOS = 1, 2
_SKIPPED = {"site-packages", "__pycache__", "lib2to3"}
_MAX_FILE_BYTES = 300_000
_MIN_CHARACTERS = 200
_HELDOUT_SHARE = 0.02
_HELDOUT_TOKENS = 131_072
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ m['content'] }}\n{% else %}# {{ m['content'] | replace('\n', '\n# ') }}\n"
    "{% endif %}{% endfor %}"
)

Texts = list[tuple[str, str]]


def read_library(root: Path) -> Texts:
    """(path below root, text) of every readable .py file of sensible size, in path order."""
    texts = []
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.parts) or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # the test suite holds files in other encodings on purpose
        if len(text) >= _MIN_CHARACTERS:
            texts.append((path.relative_to(root).as_posix(), text))
    return texts


def split(texts: Texts, heldout: Sequence[str], seed: int) -> tuple[Texts, Texts]:
    """(train, heldout): the files named, in that order, or else a seeded fiftieth of all."""
    if heldout:
        by_name = dict(texts)
        held = [(name, by_name.pop(name)) for name in heldout if name in by_name]
        return list(by_name.items()), held
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    count = max(1, round(len(texts) * _HELDOUT_SHARE))
    return shuffled[count:], shuffled[:count]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with digits one by one; encoding starts with <|bos|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL[_BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, _BOS)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Texts) -> NDArray[np.uint16]:
    """All texts as one array of ids."""
    encodings = tokenizer.encode_batch([t for _, t in texts], add_special_tokens=False)
    ids = [i for e in encodings for i in (_BOS, *e.ids, _EOS)]
    return np.array(ids, dtype=np.uint16)


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[_BOS],
        "eos_token": SPECIAL[_EOS],
        "pad_token": SPECIAL[0],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation: dict[str, object] = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": 0}
    generation |= {"do_sample": True, "temperature": 0.4, "top_p": 0.95, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def prepare(args: argparse.Namespace) -> None:
    """Write the whole data folder; it appears under its name only when complete."""
    folder: Path = args.folder
    if folder.exists():
        raise SystemExit(f"{folder} exists already; remove it or name another")
    heldout: list[str] = []
    if args.heldout_of is not None:
        heldout = np.load(args.heldout_of)["files"].tolist()
    train, held = split(read_library(args.library), heldout, args.seed)
    if not train or not held:
        raise SystemExit(f"{args.library}: {len(train)} training and {len(held)} held-out files")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if args.tokenizer_of is None:
            tokenizer = train_tokenizer((t for _, t in train), args.vocab_size)
        else:
            source = resolve_model(args.tokenizer_of) / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(source))
        write_tokenizer_files(tokenizer, partial, args.context)
        train_ids = encode(tokenizer, train)
        np.save(partial / "train.npy", train_ids)
        held_ids = encode(tokenizer, held)[:_HELDOUT_TOKENS]
        names = np.array([name for name, _ in held])
        np.savez_compressed(partial / "heldout.npz", ids=held_ids, files=names)
        manifest = {
            "python": platform.python_version(),
            "train_files": len(train),
            "train_tokens": len(train_ids),
            "heldout_files": len(held),
            "heldout_tokens": len(held_ids),
            "vocab_size": tokenizer.get_vocab_size(),
            "seed": args.seed,
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(json.dumps(manifest))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="where to write")
    add("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    add("--vocab-size", type=int, default=4096, help="at most 65536")
    add("--tokenizer-of", metavar="MODEL", help="take this model's tokenizer, train none")
    add("--heldout-of", type=Path, metavar="NPZ", help="hold out the files named in it")
    add("--context", type=int, default=8192)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not 259 <= args.vocab_size <= 65536:
        parser.error(f"--vocab-size {args.vocab_size} is not in [259, 65536]")
    return args


def main() -> None:
    args = parse_args()
    try:
        prepare(args)
    except (MoestroError, OSError) as error:
        sys.exit(f"prepare_data: {error}")


if __name__ == "__main__":
    main()
