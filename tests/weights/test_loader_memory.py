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


def big_spec() -> ModelSpec:
    spec = tiny_spec(hidden_size=1024, num_hidden_layers=2, moe_layers=(False, True))
    assert isinstance(spec.moe, MoeSpec)
    moe = dataclasses.replace(spec.moe, num_experts=24, intermediate_size=1024)
    return dataclasses.replace(spec, moe=moe, num_mtp_layers=0)


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
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["samples"] > 20
    assert result["extra"] <= 0.05 * largest, result
