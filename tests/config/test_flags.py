"""Flags are the options once more: same names, same values, same messages."""

import argparse
from pathlib import Path

import pytest

from moestro.config import (
    EngineConfig,
    ServerConfig,
    add_engine_flags,
    add_server_flags,
    engine_config_from_args,
    server_config_from_args,
)
from moestro.config.flags import flag_of
from moestro.config.knob import knobs_of
from moestro.errors import ConfigError


def parse(*argv: str, positional: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser, positional_model=positional)
    add_server_flags(parser)
    return parser.parse_args(argv)


def engine(*argv: str, positional: bool = False) -> EngineConfig:
    return engine_config_from_args(parse(*argv, positional=positional))


def test_nothing_given_is_the_default() -> None:
    assert engine() == EngineConfig()
    assert server_config_from_args(parse()) == ServerConfig()


def test_every_option_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_server_flags(parser)
    text = parser.format_help()
    for owner in (EngineConfig, ServerConfig):
        for name in knobs_of(owner):
            assert flag_of(name) in text
    assert "trust-remote-code" not in text


def test_values() -> None:
    config = engine(
        "--model", "m", "--max-model-len", "32K", "--kv-cache-memory-bytes", "1GiB", "-tp", "1",
        "--no-enable-prefix-caching", "--enforce-eager", "--seed", "-3", "--block-size", "16",
        "--gpu-memory-utilization", "0.5", "-dp", "1",
    )  # fmt: skip
    assert config == EngineConfig(
        model="m",
        max_model_len=32768,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        enforce_eager=True,
        seed=-3,
        page_size=16,
        gpu_memory_utilization=0.5,
    )


def test_the_model_may_be_an_argument() -> None:
    assert engine("m", positional=True).model == "m"
    assert engine("--model", "m", positional=True).model == "m"
    assert engine("m", "--model", "m", positional=True).model == "m"
    assert engine(positional=True).model == "tiny-hy3"
    with pytest.raises(ConfigError, match="'m' and --model 'n'"):
        engine("m", "--model", "n", positional=True)


def test_hidden_flags_of_vllm() -> None:
    assert engine("--disable-log-stats", "--trust-remote-code", "false") == EngineConfig()
    with pytest.raises(ConfigError, match=r"trust_remote_code='true'.*never run"):
        engine("--trust-remote-code")
    with pytest.raises(ConfigError, match="pipeline_parallel_size='2'"):
        engine("--pipeline-parallel-size", "2")
    assert engine("--pipeline-parallel-size", "1") == EngineConfig()


@pytest.mark.parametrize(
    "argv",
    [
        ("-tp", "2"),
        ("-dp", "4"),
        ("--enable-expert-parallel",),
    ],
)
def test_what_comes_later(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="not available in this version"):
        engine(*argv)


def test_flag_and_keyword_give_the_same_message() -> None:
    with pytest.raises(ConfigError) as by_flag:
        engine("--max-num-seqs", "lots")
    with pytest.raises(ConfigError) as by_keyword:
        EngineConfig.from_kwargs(max_num_seqs="lots")
    assert str(by_flag.value) == str(by_keyword.value)


def test_unknown_flags_are_argparse_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine("--max-num-seq", "4")
    assert "--max-num-seq" in capsys.readouterr().err


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: from-file\nmax-num-seqs: 4\nport: 9000\nhost: 0.0.0.0\nseed: 7\n")
    args = parse("--config", str(path), "--max-num-seqs", "8", "--port", "9001", positional=True)
    assert engine_config_from_args(args) == EngineConfig(model="from-file", max_num_seqs=8, seed=7)
    assert server_config_from_args(args) == ServerConfig(host="0.0.0.0", port=9001)
    args = parse("mine", "--config", str(path), positional=True)
    assert engine_config_from_args(args).model == "mine"


def test_a_wrong_name_in_the_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("prot: 9000\n")
    with pytest.raises(ConfigError, match=r"'prot' is not an option in .*serve.yaml.*port"):
        engine("--config", str(path))


def test_server_values() -> None:
    args = parse("--served-model-name", "a", "b", "--port", "0", "--log-level", "debug")
    config = server_config_from_args(args)
    assert config == ServerConfig(served_model_name=("a", "b"), port=0, log_level="debug")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--port", "65536"), "port must be a whole number from 0 to 65,535"),
        (("--port", "http"), "port must be"),
        (("--host", ""), "host must be"),
        (("--shutdown-timeout", "-1"), "shutdown_timeout must be"),
        (("--log-level", "loud"), "log_level must be one of debug"),
        (("--api-key", "secret"), "api_key.*not available"),
        (("--served-model-name", ""), "served_model_name must be"),
    ],
)
def test_wrong_server_values(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_config_from_args(parse(*argv))
