"""From a run to a checkpoint folder: Hub names, bf16, expert_bias fp32, and a card.

python -m recipes.tiny_hy3.export data/ run/ model/
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

import numpy as np
import torch
from recipes.tiny_hy3.evaluate import Evaluation, evaluate, load_model
from recipes.tiny_hy3.run_state import load_state
from safetensors import SafetensorError
from safetensors.torch import save_file

from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec
from moestro.errors import MoestroError
from moestro.weights.name_map import NameMap

_FILES_OF_DATA = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def hub_tensors(spec: ModelSpec, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hub's separate tensors, cut out of the merged parameters."""
    name_map = NameMap(spec, spec.num_mtp_layers)
    tensors = {}
    for name, part in name_map.parts.items():
        parameter = state[part.parameter]
        whole = parameter if part.expert is None else parameter[part.expert]
        dtype = torch.float32 if name.endswith("expert_bias") else torch.bfloat16
        rows = whole[part.start : part.stop].to(dtype, copy=True)
        tensors[name_map.display_name(name)] = rows.contiguous()
    return tensors


def card(data: Path, spec: ModelSpec, seen_tokens: int, result: Evaluation) -> str:
    """The model card with this run's figures."""
    manifest = json.loads((data / "manifest.json").read_text())
    template = Template(Path(__file__).with_name("card_template.md").read_text())
    assert spec.moe is not None
    return template.substitute(
        total=f"{(spec.num_parameters + spec.num_mtp_parameters) / 1e6:.1f}",
        trunk=f"{spec.num_parameters / 1e6:.1f}",
        hidden=spec.hidden_size,
        layers=spec.num_hidden_layers,
        experts=spec.moe.num_experts,
        top_k=spec.moe.num_experts_per_tok,
        context=spec.max_position_embeddings,
        python=manifest["python"],
        tokens=f"{seen_tokens / 1e6:.1f}",
        heldout_tokens=f"{result.num_tokens:,}",
        loss=f"{result.loss:.4f}",
        perplexity=f"{result.perplexity:.3f}",
        mtp_loss=f"{result.mtp_loss:.4f}",
        mtp_agreement=f"{100 * result.mtp_agreement:.1f}",
    )


def export(data: Path, run: Path, folder: Path, window: int = 2048) -> Evaluation:
    """Write the checkpoint, measure it as written, and describe it. The folder appears whole."""
    if folder.exists():
        raise SystemExit(f"{folder} exists already; remove it or name another")
    state = load_state(run)
    spec = load_model_spec(run)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        shutil.copyfile(run / "config.json", partial / "config.json")
        for name in _FILES_OF_DATA:
            shutil.copyfile(data / name, partial / name)
        path = partial / "model.safetensors"
        save_file(hub_tensors(spec, state["model"]), path, metadata={"format": "pt"})
        path.chmod(0o644)
        result = evaluate(load_model(partial).eval(), np.load(data / "heldout.npz")["ids"], window)
        (partial / "CARD.md").write_text(card(data, spec, state["seen_tokens"], result))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder written by prepare_data")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--window", type=int, default=2048, help="of the held-out measurement")
    args = parser.parse_args()
    try:
        result = export(args.data, args.run, args.folder, args.window)
    except (MoestroError, OSError, SafetensorError) as error:
        sys.exit(f"export: {error}")
    print(f"{args.folder}: held-out loss {result.loss:.4f}, perplexity {result.perplexity:.3f}")


if __name__ == "__main__":
    main()
