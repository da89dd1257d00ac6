"""Arguments that no command takes."""

import pytest
from tests.cli.terminal import main


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate hi --max_tokens=3", "moestro generate has no option --max_tokens. Did you mean"),
        ("generate hi --max_tokens 3", "Did you mean --max-tokens?"),
        ("bench throughput --inputlen 3", "moestro bench throughput has no option --inputlen."),
        ("ops --zzz", "no option --zzz. moestro ops --help lists them all."),
        ("plan --jso", "moestro plan has no option --jso. Did you mean --json?"),
        ("plan a b", "'b' is one argument too many for moestro plan."),
    ],
)
def test_the_command_and_the_nearest_flag_are_named(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
