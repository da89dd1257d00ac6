"""The portable level on aarch64: built by a cross compiler, run by qemu in user mode.

No Python runs there. The kernel calls that the conformance cases make here at the portable level
are recorded with their memory and repeated there by a small program; what they leave must agree.
"""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.backends.cpu.levels import LEVELS
from tests.backends.cpu.replay import Call, read_results, recording, write_calls

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library, packing
from moestro.backends.cpu.arguments import ARGUMENTS
from moestro.ops.testing import TOLERANCES, call
from moestro.quant.format import WeightTensor

ROOT = Path(__file__).parents[3]
COMPILER, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [tool for tool in (COMPILER, QEMU, "cmake") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif(not LEVELS, reason="no kernel library was built here"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"not here: {', '.join(MISSING)} (apt-get install g++-aarch64-linux-gnu qemu-user)",
    ),
    pytest.mark.timeout(900),
]


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library and the driver for aarch64."""
    folder = tmp_path_factory.mktemp("aarch64")
    _run(
        *("cmake", "-S", ROOT, "-B", folder),
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    )
    _run("cmake", "--build", folder, "--parallel", "2")
    source = Path(__file__).with_name("replay_driver.cpp")
    _run(COMPILER, "-O1", "-std=c++17", "-o", folder / "driver", source, "-ldl")
    return folder


@pytest.fixture(scope="module")
def recorded() -> list[Call]:
    """Every launch of every conformance case at the portable level."""
    calls: list[Call] = []
    with library.native().at_level("portable"), recording(calls):
        for op in ops.all_ops():
            for body in op.bodies.get("cpu", ()):
                for case in op.cases():
                    arguments = case.draw()
                    if body.when is None or body.when(**arguments):
                        call(body.fn, arguments)
        for case in ops.linear.cases():
            weight = case.draw()["weight"]
            if isinstance(weight, WeightTensor):
                packing.unpack(packing.pack(weight))
    return calls


def test_every_kernel_is_recorded(recorded: list[Call]) -> None:
    assert Counter(c.op for c in recorded).keys() == ARGUMENTS.keys()


def test_kernels_agree_with_those_here(built: Path, recorded: list[Call], tmp_path: Path) -> None:
    write_calls(tmp_path / "calls", recorded)
    paths = (tmp_path / "calls", tmp_path / "results")
    _run(QEMU, "-L", SYSROOT, built / "driver", built / "libmoestro_cpu.so", *paths)
    for n, (made, status, buffers) in enumerate(read_results(paths[1], recorded)):
        where = f"call {n}, {made.op}"
        assert status == 0, where
        for i, (ours, theirs) in enumerate(zip(made.after, buffers, strict=True)):
            if ours != theirs:
                _compare(ours, theirs, made.dtypes[i], f"{where}, buffer {i}")


def _compare(ours: bytes, theirs: bytes, dtype: torch.dtype, where: str) -> None:
    """Integers exactly; floats as near as two roundings are."""
    assert dtype in TOLERANCES, f"{where}: {dtype} differs"
    a = torch.frombuffer(bytearray(ours), dtype=dtype).double()
    b = torch.frombuffer(bytearray(theirs), dtype=dtype).double()
    rtol, atol = TOLERANCES[dtype]
    size = a[a.isfinite()].square().mean().sqrt().item()
    torch.testing.assert_close(b, a, rtol=rtol, atol=atol * size, equal_nan=True, msg=where)
