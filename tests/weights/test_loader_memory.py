"""Loading takes no memory beyond the parameters: measured in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.weights.spellings import Tensors, hub_tensors, tiny_spec, write_single

from moestro.core.model_spec import ModelSpec, MoeSpec

MEASURE = """
import json, sys, threading
from pathlib import Path
import torch
from moestro.weights.loader import load_weights
from tests.weights.parameter_holder import ParameterHolder
from tests.weights.test_loader_memory import big_spec

def anonymous_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(fields[k].split()[0]) * 1024 for k in ("RssAnon", "RssShmem"))

def watch():
    while not done.wait(0.001):
        samples.append(anonymous_bytes())

# The parameters are filled by hand here, so what is measured after is not theirs.
model = ParameterHolder(big_spec(), torch.bfloat16)
samples, done = [anonymous_bytes()], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
folder = Path(sys.argv[1])
watcher = lambda *_: samples.append(anonymous_bytes())
load_weights(model.spec, model.state_dict(), folder, watcher)
done.set()
thread.join()
print(json.dumps({"extra": max(samples) - samples[0], "samples": len(samples)}))
"""

QUANTIZED = """
import json, sys, threading
from pathlib import Path
import torch
from moestro.backends import load_backend
from moestro.core.weight_format import WeightFormat, WeightFormats
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.weights.loader import load_weights
from moestro.weights.packed_cache import named_tensors
from tests.weights.test_loader_memory import anonymous_bytes, big_spec

device, plain = load_backend("cpu"), WeightFormat("bfloat16")
formats = WeightFormats(plain, WeightFormat(sys.argv[2], int(sys.argv[3])), WeightFormat("w8a8"))
model = build_model(big_spec(), Parameters(torch.bfloat16, formats, "cpu", device))
final = sum(t.nbytes for _, t in named_tensors(model.weights))
samples, done = [anonymous_bytes()], threading.Event()

def watch():
    while not done.wait(0.001):
        samples.append(anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
load_weights(big_spec(), model.weights, Path(sys.argv[1]), backend=device)
done.set()
thread.join()
extra = max(samples) - samples[0] - final
print(json.dumps({"extra": extra, "final": final, "samples": len(samples)}))
"""


def anonymous_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[k].split()[0]) * 1024 for k in ("RssAnon", "RssShmem"))


def big_spec() -> ModelSpec:
    spec = tiny_spec(hidden_size=1024, num_hidden_layers=2, moe_layers=(False, True))
    assert isinstance(spec.moe, MoeSpec)
    moe = dataclasses.replace(spec.moe, num_experts=24, intermediate_size=1024)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return dataclasses.replace(spec, moe=moe, num_mtp_layers=0, intermediate_size=64, **heads)


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """302 MB of fp32, two thirds of it in one stacked tensor; and that tensor's bytes."""
    spec = big_spec()
    tensors: Tensors = hub_tensors(dataclasses.replace(spec, moe_layers=(False, False)))
    name = "model.layers.1.mlp."
    tensors = {n: t for n, t in tensors.items() if not n.startswith(name)}
    moe = spec.moe
    e, i, n = moe.num_experts, moe.intermediate_size, spec.hidden_size
    tensors |= {
        f"{name}router.gate.weight": torch.ones(e, n),
        f"{name}expert_bias": torch.ones(e),
        f"{name}experts.gate_up_proj": torch.ones(e, 2 * i, n),
        f"{name}experts.down_proj": torch.ones(e, n, i),
        f"{name}shared_mlp.gate_proj.weight": torch.ones(2 * i, n),
        f"{name}shared_mlp.up_proj.weight": torch.ones(2 * i, n),
        f"{name}shared_mlp.down_proj.weight": torch.ones(n, 2 * i),
    }
    folder = write_single(tmp_path_factory.mktemp("big"), tensors)
    return folder, max(t.nbytes for t in tensors.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_no_extra_anonymous_memory(big_checkpoint: tuple[Path, int]) -> None:
    """The limit is the largest tensor plus 5%; the loader keeps to the 5% alone."""
    folder, largest = big_checkpoint
    result = _measure(MEASURE, str(folder))
    assert result["samples"] > 20
    assert result["extra"] <= 0.05 * largest, result


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("quantization", "group_size"), [("w8a8", 0), ("w4a8", 32), ("fp8", 0)])
def test_quantising_takes_blocks_not_tensors(
    quantization: str, group_size: int, big_checkpoint: tuple[Path, int]
) -> None:
    """The limit is the final format, the largest tensor and 5%; a tenth of that tensor is used,
    mostly the code and the threads that quantise."""
    folder, largest = big_checkpoint
    result = _measure(QUANTIZED, str(folder), quantization, str(group_size))
    assert result["samples"] > 20
    assert result["extra"] <= 0.2 * largest, result


def _measure(script: str, *arguments: str) -> dict[str, int]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found
