"""The bar shows on a terminal only."""

import io
import sys

import pytest

from moestro.engine.progress_bar import prompt_progress


class Terminal(io.StringIO):
    """stderr of somebody who watches."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "wanted", "shown"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_who_sees_a_bar(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, wanted: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with prompt_progress(3, wanted) as bar:
        bar.advance(1, 10)
        bar.advance(3, 40)
    assert ("3/3" in stderr.getvalue()) is shown
