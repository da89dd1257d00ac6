"""`moestro doctor`: is this installation whole, and what does it find on this machine."""

import argparse
import hashlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text

HELP = "check the installation and show what it finds on this machine"
DESCRIPTION = (
    "Python, libraries, kernels, CPU, memory, disk, the bundled model and the default port. "
    "Fails when something is broken; a warning is no failure."
)

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. facts: the same for --json, exact."""

    name: str
    state: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro doctor`."""
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="folder to look at (default: MOESTRO_CACHE_DIR)"
    )
    parser.add_argument(
        "--clear-cache", action="store_true", help="first delete the packed weights in it"
    )
    add_common_flags(parser, json_help="print the findings as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything; 1 when something is broken."""
    start_logging(args)
    if args.clear_cache:
        from moestro.weights import packed_cache

        packed_cache.clear(_cache_root(args.cache_dir) / packed_cache.FOLDER)
    found = list(findings(args.cache_dir))
    broken = any(f.state == ERROR for f in found)
    if args.json:
        listed = [{"name": f.name, "state": f.state, "text": f.text, **f.facts} for f in found]
        print_json({"ok": not broken, "findings": listed})
    else:
        width = max(len(f.name) for f in found)
        lines = [f"{_MARKS[f.state]} {f.name:<{width}}  {f.text}" for f in found]
        write_text("\n".join(lines) + "\n")
    return 1 if broken else 0


_MARKS = {OK: "   ok", WARNING: " warn", ERROR: "ERROR"}


def findings(cache_dir: str | None) -> Iterator[Finding]:
    """Everything `doctor` looks at. A check that fails in itself is a finding too."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("python", _python),
        ("libraries", _libraries),
        ("kernels", _kernels),
        ("cpu", _cpu),
        ("speed", _speed),
        ("memory", _memory),
        ("cache", lambda: _cache(cache_dir)),
        ("bundled model", _bundled_model),
        ("port", _port),
        ("environment", _environment),
    )
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # whatever is broken here is the answer
            yield Finding(name, ERROR, f"{type(error).__name__}: {error}")


def _python() -> Finding:
    from moestro import __version__

    text = f"{platform.python_version()} ({sys.executable}), moestro {__version__}"
    facts = {"version": platform.python_version(), "moestro": __version__}
    inside = (3, 11) <= sys.version_info[:2] <= (3, 13)
    if not inside:
        return Finding("python", WARNING, f"{text}: 3.11 to 3.13 are tested", facts)
    return Finding("python", OK, text, facts)


def _libraries() -> Finding:
    from moestro.cli.machine import LIBRARIES, library_version

    versions = {name: library_version(name) for name in LIBRARIES}
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version == "missing"]
    if missing:
        return Finding("libraries", ERROR, f"{text}: run pip install moestro again", versions)
    import torch

    return Finding("libraries", OK, f"{text} ({torch.get_num_threads()} torch threads)", versions)


def _kernels() -> Finding:
    from moestro.cli.machine import kernel_facts

    facts = kernel_facts()
    levels = ", ".join(facts["available_isas"]) or "none"
    if facts["isa"] == "reference":
        text = f"{facts['identity']}: the slow reference bodies serve ({facts['reason']}); "
        return Finding("kernels", WARNING, f"{text}levels here: {levels}", facts)
    text = f"{facts['identity']}; levels here: {levels}"
    return Finding("kernels", OK, text, facts)


def _cpu() -> Finding:
    from moestro.cli.machine import machine_facts

    facts = machine_facts()
    quota = f", cgroup {facts['cgroup_cpus']:g}" if facts["cgroup_cpus"] is not None else ""
    text = (
        f"{facts['cpu']}: {facts['num_cpus']} CPUs, {facts['num_cpus_in_affinity']} in the "
        f"affinity mask{quota}; {facts['num_threads']} threads by default"
    )
    return Finding("cpu", OK, text, facts)


def _speed() -> Finding:
    """What the machine reaches now, measured in half a second."""
    from moestro.backends.cpu import library
    from moestro.cli.bench.machine import measure_machine

    if not library.has_native():
        return Finding("speed", OK, "not measured: no kernel library is in use")
    limits = measure_machine(seconds=0.3)
    peaks = [f"fp32 {limits.fp32_gflops:,.0f} GFLOP/s"]
    if limits.bf16_gflops is not None:
        peaks.append(f"bf16 {limits.bf16_gflops:,.0f} GFLOP/s")
    if limits.int8_gops is not None:
        peaks.append(f"int8 {limits.int8_gops:,.0f} GOP/s")
    text = (
        f"{limits.num_threads} threads at level {limits.level} read {limits.read_gbps:.1f} GB/s; "
        f"peaks: {', '.join(peaks)} (moestro bench machine measures longer)"
    )
    return Finding("speed", OK, text, asdict(limits))


def _memory() -> Finding:
    from moestro.cli.machine import machine_facts
    from moestro.planner.units import gigabytes

    facts = machine_facts()
    limit = facts["cgroup_memory_bytes"]
    text = f"{gigabytes(facts['memory_bytes'])}, {gigabytes(facts['available_bytes'])} available"
    text += f", cgroup limit {gigabytes(limit)}" if limit is not None else ", no cgroup limit"
    shown = {k: facts[k] for k in ("memory_bytes", "available_bytes", "cgroup_memory_bytes")}
    return Finding("memory", OK, text, shown)


def _cache_root(cache_dir: str | None) -> Path:
    from moestro import envs

    return (Path(cache_dir) if cache_dir is not None else envs.CACHE_DIR.get()).expanduser()


def _cache(cache_dir: str | None) -> Finding:
    from moestro.planner.units import gigabytes
    from moestro.weights import packed_cache

    path = _cache_root(cache_dir)
    parent = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(parent).free
    used = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else 0
    packed = packed_cache.cached_files(path / packed_cache.FOLDER)
    facts = {
        "path": str(path),
        "used_bytes": used,
        "free_bytes": free,
        "packed_weights": [{"path": str(f.path), "bytes": f.num_bytes} for f in packed],
    }
    text = f"{path}: {gigabytes(used)} used, {gigabytes(free)} free on its disk"
    if packed:
        size = gigabytes(sum(f.num_bytes for f in packed))
        text += f"; packed weights of {len(packed)} models, {size} (--clear-cache deletes them)"
    if not os.access(parent, os.W_OK) or not parent.is_dir():
        return Finding("cache", WARNING, f"{text}; {parent} is not a folder to write to", facts)
    return Finding("cache", OK, text, facts)


def _bundled_model() -> Finding:
    """Every file of every bundled model against the SHA256SUMS beside it."""
    from moestro.weights.source import bundled_models, resolve_model

    wrong, checked = [], 0
    for name in bundled_models():
        folder = resolve_model(name)
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            expected, _, file_name = line.partition("  ")
            checked += 1
            path = folder / file_name
            if not path.is_file() or _sha256(path) != expected:
                wrong.append(f"{name}/{file_name}")
    facts = {"models": list(bundled_models()), "files_checked": checked, "wrong": wrong}
    if wrong or not checked:
        text = f"damaged: {', '.join(wrong) or 'nothing there'}. Install the package again."
        return Finding("bundled model", ERROR, text, facts)
    names = ", ".join(bundled_models())
    return Finding("bundled model", OK, f"{names}: {checked} files, checksums match", facts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _port() -> Finding:
    from moestro.config import ServerConfig

    options = ServerConfig()
    where = f"{options.host}:{options.port}"
    facts = {"host": options.host, "port": options.port}
    with socket.socket() as sock:
        sock.settimeout(1.0)
        if sock.connect_ex((options.host, options.port)) == 0:
            text = f"{where} is in use: moestro serve needs --port"
            return Finding("port", WARNING, text, {**facts, "free": False})
    return Finding("port", OK, f"{where} is free", {**facts, "free": True})


def _environment() -> Finding:
    from moestro import envs

    values = {variable.name: str(variable.get()) for variable in envs.ALL}
    changed = [f"{v.name}={v.get()}" for v in envs.ALL if v.is_set]
    unknown = envs.unknown_names()
    if unknown:
        text = f"not known, without effect: {', '.join(unknown)}"
        return Finding("environment", WARNING, text, {**values, "unknown": list(unknown)})
    return Finding("environment", OK, ", ".join(changed) or "no MOESTRO_ variable is set", values)
