"""Size budgets (DESIGN principle 8) and names that hide what a file is about."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "moestro"
SOURCES = [
    p for d in ("src", "bench", "recipes", "scripts", "tests") for p in (ROOT / d).rglob("*.py")
]
NATIVE = [p for p in PACKAGE.rglob("*") if p.suffix in (".cpp", ".h", ".inl")]

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 600
MAX_LINE = 100
MAX_FUNCTION_LINES = 60
MAX_NATIVE_FUNCTION_LINES = 120
MAX_PARAMETERS = 8
VAGUE = re.compile(r"^(utils?|common|helpers?|misc)$")


def test_file_lengths() -> None:
    over = [
        f"{p.relative_to(ROOT)}: {n}"
        for p in SOURCES + NATIVE
        if (n := len(p.read_text().splitlines()))
        > (MAX_KERNEL_FILE_LINES if "backends" in p.parts else MAX_FILE_LINES)
    ]
    assert over == []


def test_line_lengths() -> None:
    over = [
        f"{p.relative_to(ROOT)}:{i}"
        for p in SOURCES + NATIVE
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if len(line) > MAX_LINE
    ]
    assert over == []


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length_without_docstring(fn: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert fn.end_lineno is not None
    lines = fn.end_lineno - fn.lineno + 1
    first = fn.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_doc and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_function_lengths() -> None:
    over = [
        f"{p.relative_to(ROOT)}: {fn.name} has {n} lines"
        for p in SOURCES
        for fn in functions(p)
        if (n := length_without_docstring(fn)) > MAX_FUNCTION_LINES
    ]
    assert over == []


def test_parameter_counts() -> None:
    over = []
    for p in PACKAGE.rglob("*.py"):
        for fn in functions(p):
            args = fn.args
            names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            if count > MAX_PARAMETERS:
                over.append(f"{p.relative_to(ROOT)}: {fn.name} takes {count}")
    assert over == []


def native_function_lengths(text: str) -> Iterator[tuple[str, int]]:
    """(first line, number of lines) of each function body, found by its braces."""
    depth, start, opened_at, head = 0, 0, 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"(\\.|[^"\\])*"|//.*', "", line)
        opens = code.count("{")
        is_scope = re.match(r"\s*(namespace|struct|class|enum|union|extern)\b", code) is not None
        if opens and not start and not is_scope and ")" in head + code:
            start, opened_at, name = number, depth, line.strip()
        depth += opens - code.count("}")
        if start and depth <= opened_at:
            yield name, number - start + 1
            start = 0
        head = "" if code.rstrip().endswith((";", "{", "}")) else head + code


def test_native_function_lengths() -> None:
    over = [
        f"{p.relative_to(ROOT)}: {name} has {n} lines"
        for p in NATIVE
        for name, n in native_function_lengths(p.read_text())
        if n > MAX_NATIVE_FUNCTION_LINES
    ]
    assert over == []


def test_native_scanner_sees_functions() -> None:
    text = "namespace a {\nint f(int x) {\n  return x;\n}\nstruct S {\n  int g() {\n\n  }\n};\n}\n"
    assert [n for _, n in native_function_lengths(text)] == [3, 3]


def test_no_vague_module_names() -> None:
    assert [str(p) for p in PACKAGE.rglob("*") if VAGUE.match(p.stem)] == []


def test_python_is_ascii() -> None:
    """Source stays ASCII; characters beyond it are written as escapes."""
    strays = [str(p.relative_to(ROOT)) for p in SOURCES if not p.read_text().isascii()]
    assert strays == []
