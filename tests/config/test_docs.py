"""The configuration page lists everything there is."""

from moestro import envs
from moestro.config import EngineConfig, ServerConfig
from moestro.config.docs import config_markdown
from moestro.config.knob import knobs_of
from moestro.config.vllm_names import FOREIGN_NAMES


def test_page_is_complete() -> None:
    page = config_markdown()
    names = [*knobs_of(EngineConfig), *knobs_of(ServerConfig), *FOREIGN_NAMES]
    for name in [*names, *(variable.name for variable in envs.ALL)]:
        assert f"`{name}`" in page


def test_page_is_well_formed() -> None:
    page = config_markdown()
    assert page.isascii()
    assert page.endswith("\n")
    columns = 0
    for line in page.splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        here = line.replace("\\|", "").count("|")
        assert columns in (0, here), line
        columns = here
