"""Finding, checking and loading the library, and what happens without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.backends.cpu.levels import LEVELS

from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.errors import ConfigError, UnsupportedError

needs_library = pytest.mark.skipif(not LEVELS, reason="no kernel library was built here")

SHOW = (
    "import torch, moestro.backends.cpu as cpu\n"
    "from moestro import ops\n"
    "ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)\n"
    "print(cpu.library.identity(), *(b.name for b in ops.rms_norm.bodies['cpu']))"
)


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_library
@pytest.mark.parametrize("isa", [*LEVELS, "auto"])
def test_a_level_can_be_forced(isa: str) -> None:
    out = _python(SHOW, MOESTRO_CPU_ISA=isa)
    level = LEVELS[0] if isa == "auto" else isa
    assert out.stdout.split() == [f"cpu-{level}-v{library.NUMERICS_VERSION}", "cpu.norm.rms_norm"]
    assert out.stderr == ""


def test_the_emulated_level_is_never_chosen_by_itself() -> None:
    # Only a build for tests has it; it stands last, behind portable, which every build has.
    assert library.EMULATED not in library.LEVELS
    assert LEVELS[:1] != (library.EMULATED,)


@needs_library
@pytest.mark.parametrize(("machine", "lines"), [("x86_64", 1), ("aarch64", 0)])
def test_a_processor_without_avx2_is_served_and_told_once(machine: str, lines: int) -> None:
    code = (
        "import platform; from moestro.backends.cpu import library\n"
        f"platform.machine = lambda: {machine!r}\n"
        "library.Library.levels = lambda self: ('portable',)\n"
        "library._loaded.cache_clear()\n"
    )
    out = _python(code + SHOW + "\n" + SHOW, MOESTRO_CPU_ISA="auto")
    expected = [f"cpu-portable-v{library.NUMERICS_VERSION}", "cpu.norm.rms_norm"]
    assert out.stdout.split() == 2 * expected
    assert len(out.stderr.splitlines()) == lines
    assert out.stderr.count("no AVX2") == lines
    asked = _python(code + SHOW, MOESTRO_CPU_ISA="portable")
    assert (asked.stdout.split(), asked.stderr) == (expected, "")


def test_reference_can_be_forced_without_a_warning() -> None:
    out = _python(SHOW, MOESTRO_CPU_ISA="reference")
    assert out.stdout.split()[1:] == ["reference"]
    assert out.stderr == ""


def test_without_a_library_the_reference_serves_and_one_line_says_so(tmp_path: Path) -> None:
    package = Path(library.__file__).parents[2]
    ignore = shutil.ignore_patterns("*.so", "csrc", "bundled", "__pycache__")
    shutil.copytree(package, tmp_path / "moestro", ignore=ignore)
    code = f"import moestro; moestro.__path__[:] = [{str(tmp_path / 'moestro')!r}]\n" + SHOW
    out = _python(code, MOESTRO_CPU_ISA="auto")
    assert out.stdout.split()[1:] == ["reference"], out.stderr
    lines = out.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "no C++ compiler" in lines[0]


def test_a_level_that_is_not_there_is_an_error_that_names_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MOESTRO_CPU_ISA=avx512.*it has: reference"):
        library.open_library(None, "avx512")


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_broken_library_is_reported_and_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / library.FILE_NAME).write_bytes(content)
    found = library.find_library([str(tmp_path)])
    assert found == tmp_path / library.FILE_NAME
    loaded, status = library.open_library(found, "auto")
    assert loaded is None
    assert status.isa == "reference"
    assert str(found) in status.reason


@needs_library
def test_a_library_of_another_abi_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    loaded, status = library.open_library(library.native().path, "auto")
    assert loaded is None
    assert "ABI is version" in status.reason


def test_find_library_takes_the_first_folder_that_has_one(tmp_path: Path) -> None:
    assert library.find_library([str(tmp_path)]) is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / library.FILE_NAME).touch()
    found = library.find_library([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found == tmp_path / "b" / library.FILE_NAME


@needs_library
def test_prepared_weights_are_the_same_tensors_with_room_for_what_they_held() -> None:
    weights = [torch.empty(9, 5, dtype=torch.bfloat16), torch.empty(2**21), torch.empty(0)]
    values = [torch.randn(w.shape).to(w.dtype) for w in weights]
    load_backend("cpu").prepare_weights(weights)
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
    assert all(torch.equal(w, v) for w, v in zip(weights, values, strict=True))


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_of_any_size_lie_in_one_mapping_of_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    weights = [torch.empty(1000), torch.empty(2**20), torch.empty(7, dtype=torch.uint8)]
    load_backend("cpu").prepare_weights(weights)
    mappings = {_mapping_of(weight.data_ptr()) for weight in weights}
    assert len(mappings) == 1
    assert "hg" in mappings.pop()[1]


def _mapping_of(address: int) -> tuple[str, tuple[str, ...]]:
    """Its range, and the flags that /proc/self/smaps tells of it."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and found:
            return found, tuple(rest)
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            found = first if begin <= address < end else ""
    raise AssertionError(f"no mapping holds {address:#x}")


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_scratch_that_the_system_refuses_is_a_memory_error() -> None:
    code = (
        "import resource, torch, moestro.backends.cpu\n"
        "from moestro import ops\n"
        "tokens = 2**16\n"
        "weights = ops.ExpertWeights(torch.ones(1, 2**15, 4), torch.ones(1, 4, 2**14))\n"
        "ids = torch.zeros(tokens, 1, dtype=torch.int32)\n"
        "routing = ops.Routing(ids, torch.ones(tokens, 1))\n"
        "x = torch.ones(tokens, 4)\n"
        "ops.moe_experts(x[:1], ops.Routing(ids[:1], routing.topk_weights[:1]), weights, True)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))\n"
        "try:\n"
        "    ops.moe_experts(x, routing, weights, True)\n"
        "except MemoryError as error:\n"
        "    print(error)"
    )
    out = _python(code)
    assert out.stdout.strip() == "no memory for the experts' scratch", out.stderr


def test_load_backend_gives_the_cpu_and_refuses_the_rest() -> None:
    device = load_backend("cpu")
    assert device.name == "cpu"
    assert device.identity == library.identity()
    assert device.hardware().isa == library.status().isa
    with pytest.raises(ValueError, match="at least 1"):
        device.set_num_threads(0)
    with pytest.raises(UnsupportedError, match="tpu"):
        load_backend("tpu")
