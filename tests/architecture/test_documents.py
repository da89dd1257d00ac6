"""Documents keep step with the code: generated pages, links, commands, glossary, records."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.metrics.kv_numbers import FULL

from moestro.metrics import ServerMetrics
from moestro.server.app import REQUEST_MODELS
from moestro.server.openai.fields import SDK_IGNORED

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "recipes").rglob("*.md"),
    *(ROOT / "bench").rglob("*.md"),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (heading and heading not in _anchors(path)):
            broken.append(target)
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_pages_are_current() -> None:
    """docs/ops.md, docs/config.md and docs/cli.md say what the code says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_holds_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 'pip install . && moestro generate "def quicksort(items):"' in readme
    assert "pip install '.[test]' && pytest" in readme


def test_ci_runs_the_readme_commands() -> None:
    """.ci/run takes the commands from the README, so they can't drift apart."""
    text = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in text
    assert "scripts/check" in text


def test_python_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    listed = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if "Python :: 3." in c]
    assert listed == ["3.11", "3.12", "3.13"]


def test_records_are_complete() -> None:
    """Every decision record states its parts and is listed in the index."""
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert records
    for record in records:
        text = record.read_text()
        missing = [
            part
            for part in ("## Context", "## Decision", "## Consequences", "## What would change it")
            if part not in text
        ]
        assert missing == [], record.name
        assert record.name in index
    numbers = [int(r.name[:4]) for r in records]
    assert numbers == list(range(1, len(numbers) + 1))


SEED_ABBREVIATIONS = (
    "AIV AllGather AllReduce AlltoAll C8 CANN CTA DP DPTP EP EPLB FA FFMA FFN FP8 FusedMoE "
    "GEMM GE GMM GPTQ GQA HBM HCCL HPC-BSA KV KVP KVStore Lamport L1 L2 L3 LM MC2 MHA MMA "
    "MoE MQA MTP MXFP4 MXFP8 NCCL NPU OAM P2P PD PDL QAT QKV ReduceScatter RMSNorm RoPE "
    "SLO SM SP Stem SuperKernel SwiGLU TP TPOT TPSP TTFT W4A8 W8A8C8 "
)


def test_glossary_covers_the_seeds() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = set()
    for cell in re.findall(r"^\| ([^|]+) \|", text, flags=re.M):
        terms |= {t.strip() for t in cell.split(",")}
    assert sorted(set(SEED_ABBREVIATIONS.split()) - terms) == []


PACKAGE = ROOT / "src" / "moestro"
NAMED = re.compile(r"`([^`]+)`(, later)?")


def test_glossary_says_where_things_are() -> None:
    """A path in the last column exists; one marked later is not there yet, or an empty package."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    wrong = []
    for term, where in re.findall(r"^\| ([^|]+) \|[^|]*\| ([^|]+) \|$", text, flags=re.M):
        for name, later in NAMED.findall(where):
            if bool(later) is _holds_code(PACKAGE / name):
                wrong.append(f"{term}: {name}{later}")
    assert wrong == []


def _holds_code(path: Path) -> bool:
    """Whether a file, a module named without its suffix, or a package with code stands there."""
    if path.is_dir():
        return any(file.name != "__init__.py" for file in path.rglob("*.py"))
    return path.is_file() or path.with_suffix(".py").is_file()


SOURCE_FILE = re.compile(r"`([\w/-]+\.(?:py|cpp|h|inl))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """A source file in backquotes is there, seen from the root, the package or the page."""
    homes = (ROOT, PACKAGE, page.parent)
    missing = [
        name
        for name in SOURCE_FILE.findall(page.read_text())
        if not any((home / name).is_file() for home in homes)
    ]
    assert missing == []


RESULTS = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_published_results_name_no_local_path(path: Path) -> None:
    """Neither where the model lay nor where an engine did: MODEL_DIR and the like stand there."""
    assert re.findall(r'(?<=[" =])[/~][\w.-]+/[^" ]*', path.read_text()) == []


def test_overview_is_current() -> None:
    """docs/overview.svg is what scripts/draw_overview draws; what works has its packages."""
    drawing = runpy.run_path(str(ROOT / "scripts" / "draw_overview"))
    assert (ROOT / "docs" / "overview.svg").read_text() == drawing["draw"]()
    for title, packages, *columns in drawing["ROWS"]:
        if any(works for column in columns for _, works in column):
            paths = [PACKAGE / name for name in packages.split(", ")]
            assert all(p.is_dir() or p.with_suffix(".py").is_file() for p in paths), title


def test_server_page_lists_every_metric() -> None:
    """docs/server.md names the metrics that a server exposes, all of them and no others."""
    metrics = ServerMetrics("model", 1024, {})
    metrics.kv_tiers.set(FULL)
    metrics.kv_tiers.watch_events(lambda: (0, 0))
    exposed = {m.name for m in metrics.registry.collect()}
    page = (ROOT / "docs" / "server.md").read_text()
    assert set(re.findall(r"`((?:vllm|moestro):\w+)`", page)) == exposed


def test_server_page_lists_every_field() -> None:
    """docs/server.md names each field that a request may hold."""
    fields = {name for model in REQUEST_MODELS for name in model.model_fields} | SDK_IGNORED
    named = set(re.findall(r"`(\w+)[`:]", (ROOT / "docs" / "server.md").read_text()))
    assert sorted(fields - named) == []


def test_the_tests_that_documents_name_exist() -> None:
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", page.read_text()))
    assert len(named) > 20
    missing = [
        (file, name)
        for file, name in sorted(named)
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text() + "def ("
    ]
    assert missing == []
