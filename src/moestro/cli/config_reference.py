"""docs/config.md: every option, its default, what it takes, and the environment variables."""

from collections.abc import Iterator
from dataclasses import MISSING, Field
from typing import Any

from moestro import envs
from moestro.config import EngineConfig, ServerConfig
from moestro.config.knob import Knob, knobs_of
from moestro.config.vllm_names import FOREIGN_NAMES

INTRODUCTION = """# Configuration

<!-- Written by scripts/docs from src/moestro/config and envs.py; edit those. -->

One list of options: an `EngineConfig` field is a keyword of `LLM(...)`, a key of the YAML file and,
with dashes for underscores, a flag. A value that a later version brings is refused by name until
then. `moestro serve` takes the server's options too, from flags or the same file.
"""


def config_page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for title, owner in (("Engine", EngineConfig), ("Server", ServerConfig)):
        parts.append(f"## {title}\n")
        parts += _option_tables(owner)
    parts += ["## Environment\n", *_environment(), ""]
    parts += ["## Options of vLLM that are none here\n", *_foreign(), ""]
    return "\n".join(parts).rstrip() + "\n"


def _option_tables(owner: type) -> Iterator[str]:
    group = None
    for name, (described, option) in knobs_of(owner).items():
        if option.group != group:
            if group is not None:
                yield ""
            group = option.group
            yield f"### {group}\n\n| option | default | takes | meaning |\n|---|---|---|---|"
        yield "| " + " | ".join(_row(name, described, option)) + " |"
    yield ""


def _row(name: str, described: Field[Any], option: Knob) -> tuple[str, str, str, str]:
    other = ", ".join(f"`{n}`" for n in (*option.flags, *option.also))
    shown = f"`{name}`" + (f" ({other})" if other else "")
    assert described.default is not MISSING
    default = "" if described.default in (None, ()) else f"`{described.default}`"
    meaning = option.help
    if option.waits_for is not None:
        usable = " or ".join(f"`{value}`" for value in option.ready)
        meaning += f" In this version only {usable}; more comes with {option.waits_for}."
    return shown, default, _cell(option.kind.expects), _cell(meaning)


def _environment() -> Iterator[str]:
    yield "| variable | default | takes | meaning |\n|---|---|---|---|"
    for variable in envs.ALL:
        default = "" if variable.default is None else f"`{variable.default}`"
        cells = (f"`{variable.name}`", default, _cell(variable.values), _cell(variable.doc))
        yield "| " + " | ".join(cells) + " |"


def _foreign() -> Iterator[str]:
    yield (
        "Accepted with a value that asks for what happens anyway, so that a script written for "
        "vLLM starts; refused with the reason otherwise.\n"
    )
    yield "| option | accepted | why no other value |\n|---|---|---|"
    for name, foreign in FOREIGN_NAMES.items():
        accepted = ", ".join(f"`{value!r}`" for value in foreign.harmless) or "nothing"
        yield f"| `{name}` | {_cell(accepted)} | {_cell(foreign.reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
