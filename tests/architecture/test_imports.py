"""Who may import whom, and which library may be imported where (docs/architecture.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "moestro"

# A library, and the only places that may import it (paths inside the package).
ONLY_IN = {
    "triton": ("backends/triton/",),
    "torch_npu": ("backends/npu/",),
    "safetensors": ("weights/", "quantize/convert"),
    "tokenizers": ("engine/tokenizer.py",),
    "jinja2": ("chat/sandbox.py",),
    "fastapi": ("server/",),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    "ctypes": ("backends/cpu/", "kvstore/data_file.py"),
    "lmdb": ("kvstore/",),
    "redis": ("kvstore/",),
    "mooncake": ("kvstore/",),
    "yaml": ("config/sources.py",),
    "prometheus_client": ("metrics/",),
    "zmq": ("engine/kv_event_publisher.py",),
    "msgspec": ("engine/kv_event_publisher.py",),
}

CONTROL_PLANE = ("core", "kvcache", "scheduler", "planner", "chat", "server")
CONTROL_MODULES = (
    "moestro",
    "moestro.config",
    "moestro.envs",
    "moestro.errors",
    "moestro.log",
    "moestro.metrics",
    "moestro.engine.engine",
    "moestro.engine.async_engine",
    "moestro.cli.main",
    "moestro.weights.source",
)


def python_files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def imported_roots(path: Path) -> set[str]:
    """Top-level names of everything a file imports, at any depth of nesting."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_library_stays_where_it_belongs(library: str) -> None:
    allowed = ONLY_IN[library]
    strays = [
        str(p.relative_to(PACKAGE))
        for p in python_files()
        if library in imported_roots(p) and not str(p.relative_to(PACKAGE)).startswith(allowed)
    ]
    assert strays == [], f"{library} may be imported only in {allowed}"


def test_environment_is_read_in_envs_only() -> None:
    strays = []
    for path in python_files():
        if path.name == "envs.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                strays.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert strays == []


def test_nothing_prints_outside_the_command_line() -> None:
    strays = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in python_files()
        if "cli" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert strays == []


def control_modules() -> list[str]:
    found = list(CONTROL_MODULES)
    for package in CONTROL_PLANE:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(p for p in parts if p != "__init__"))
    return found


def test_control_plane_imports_without_torch() -> None:
    """Every control-plane module imports in a process where torch can't be imported."""
    script = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {control_modules()!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_contracts() -> None:
    """The layers of pyproject's [tool.importlinter] hold."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(lint), "--no-cache"], cwd=PACKAGE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
