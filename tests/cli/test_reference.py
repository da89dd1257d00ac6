"""The list of flags is kept, so that none changes or goes by accident."""

from pathlib import Path

from moestro.cli.reference import cli_page, commands, flag_list
from moestro.config import EngineConfig, ServerConfig
from moestro.config.knob import knobs_of
from moestro.core.sampling_params import sampling_field_names

GOLDEN = Path(__file__).with_name("flags.golden")


def test_flags_are_the_golden_ones() -> None:
    """After a change that is meant: python -m tests.cli.flags > tests/cli/flags.golden."""
    assert flag_list().splitlines() == GOLDEN.read_text().splitlines()


def test_every_option_of_the_engine_has_its_flag_where_it_belongs() -> None:
    wanted = {"--" + name.replace("_", "-") for name in knobs_of(EngineConfig)}
    sampling = {"--" + n.replace("_", "-") for n in sampling_field_names() if n != "grammar"}
    server = {"--" + name.replace("_", "-") for name in knobs_of(ServerConfig)}
    for command in commands():
        names = {name for flag in command.flags for name in flag.names}
        last = command.name.split()[-1]
        if last in ("generate", "chat", "serve", "plan", "throughput"):
            assert wanted <= names, command.name
        if last in ("generate", "chat", "throughput"):
            assert sampling <= names
        if last == "serve":
            assert server <= names
        if last in ("generate", "plan", "ops", "doctor", "throughput"):
            assert "--json" in names


def test_page_holds_every_command() -> None:
    page = cli_page()
    for command in commands():
        assert f"\n## {command.name}\n" in page


def test_page_is_made_of_tables_that_render() -> None:
    """Every row has the columns of its header: a bar inside a cell is escaped."""
    columns = 0
    for line in cli_page().splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        found = line.replace("\\|", "").count("|")
        assert columns in (0, found), line
        columns = found
