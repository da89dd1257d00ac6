"""LLM over the bundled model: shapes of input, errors, life and memory."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moestro import LLM, RequestOutput, SamplingParams
from moestro.core.kv_hints import KVHints
from moestro.core.request import FinishReason
from moestro.core.step import Schedule, StepOutput
from moestro.errors import ConfigError, EngineDeadError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "num_threads": 1,
    "kv_cache_memory_bytes": 20_000_000,
    "scheduling_policy": "priority",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SMALL) as made:
        yield made


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_all_shapes_of_prompts(llm: LLM) -> None:
    text = "import os"
    ids = llm.get_tokenizer().encode(text)
    expected = tokens(llm.generate(text, GREEDY))
    shapes: list[Any] = [
        [text],
        (text,),
        {"prompt": text},
        [{"prompt": text}],
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": tuple(ids)}],
    ]
    for shape in shapes:
        assert tokens(llm.generate(shape, GREEDY)) == expected
    mixed = llm.generate([text, ids, {"prompt_token_ids": ids, "prompt": "shown"}], GREEDY)
    assert tokens(mixed) == expected * 3
    assert [o.prompt for o in mixed] == [text, None, "shown"]


def test_nothing_to_do(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_defaults_are_the_checkpoints(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p) == (0.4, 0.95)
    output = llm.generate("import os")[0]
    assert len(output.outputs[0].token_ids) <= 16
    with LLM(generation_config="none", **SMALL) as plain:
        assert plain.get_default_sampling_params() == SamplingParams()


def test_outputs_keep_the_order_of_prompts(llm: LLM) -> None:
    params = [GREEDY.with_(max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, priority=[2, 1, 0])
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]
    assert len({o.request_id for o in outputs}) == 3


def test_stop_strings_and_reasons(llm: LLM) -> None:
    plain = llm.generate("def quicksort(items):", GREEDY.with_(max_tokens=12))[0].outputs[0]
    stop = plain.text[3:6]
    cut = llm.generate("def quicksort(items):", GREEDY.with_(max_tokens=12, stop=stop))[0]
    assert cut.outputs[0].text == plain.text[: plain.text.index(stop)]
    assert cut.outputs[0].finish_reason is FinishReason.STOP
    assert cut.outputs[0].stop_reason == stop


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        (5, GREEDY, "prompts must be"),
        (b"x", GREEDY, "prompts must be"),
        (["ok", "a\ud800"], GREEDY, "position 1"),
        (["ok", [4096]], GREEDY, "out of vocabulary"),
        (["a", "b"], [GREEDY], "1 for 2"),
        ("a", 0.5, "sampling_params must be"),
        ("a", [0.5], "sampling_params must be"),
        ([[7] * 600], GREEDY, "maximum context length is 512 tokens"),
        ("x" * 10_000_000, GREEDY, "10000000 characters"),
    ],
)
def test_bad_input_leaves_nothing_behind(llm: LLM, prompts: Any, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 0)


@pytest.mark.parametrize("priority", [[1], 5, "ab", [1, "x"]])
def test_priority_needs_one_a_prompt(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        llm.generate(["a", "b"], GREEDY, priority=priority)


@pytest.mark.parametrize("kv_hints", [[KVHints()], 5, [KVHints(), "x"], {"session_id": "s"}])
def test_hints_are_one_for_all_or_one_a_prompt(llm: LLM, kv_hints: Any) -> None:
    with pytest.raises(RequestError, match="kv_hints"):
        llm.generate(["a", "b"], GREEDY, kv_hints=kv_hints)
    outputs = llm.generate(["a", "b"], GREEDY, kv_hints=[KVHints(priority=9), None])
    assert [o.finished for o in outputs] == [True, True]
    assert all(o.timing is not None and o.timing.prefill_s is not None for o in outputs)


@pytest.mark.parametrize("name", ["messages", "tools", "continue_final_message"])
def test_template_kwargs_do_not_hide_arguments(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"must not hold '{name}'"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template_kwargs={name: 1})


@pytest.mark.parametrize("messages", [[], "hello", [[]], [{"role": "x", "content": "y"}]])
def test_bad_conversations(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_chat_continues_a_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "def sum("}]
    output = llm.chat(messages, GREEDY, continue_final_message=True)[0]
    assert output.prompt == "<|bos|># sum\ndef sum("


def test_chat_takes_hints_and_priorities(llm: LLM) -> None:
    messages = [{"role": "user", "content": "sum"}]
    hints = [KVHints(session_id="a", pin_ttl_s=5), None]
    outputs = llm.chat([messages, messages], GREEDY, kv_hints=hints, priority=[0, 0])
    assert outputs[0].kv_hints is not None
    assert outputs[1].kv_hints is None
    with pytest.raises(RequestError, match="kv_hints must have one entry a prompt: 1 for 2"):
        llm.chat([messages, messages], GREEDY, kv_hints=hints[:1])
    with pytest.raises(TypeError, match="lora_request"):
        llm.chat(messages, GREEDY, lora_request=None)  # type: ignore[call-arg]


def test_tokenizer_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "sum"}]
    tokenizer = llm.get_tokenizer()
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|bos|># sum\n"
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode("# sum\n")


def test_an_interrupt_leaves_the_engine_empty_and_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside a step takes effect after it."""
    runner = llm._open().engine._runner
    execute, count = runner.execute, iter(range(100))

    def interrupted(schedule: Schedule) -> StepOutput:
        if next(count) == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(schedule)

    monkeypatch.setattr(runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm.stats().num_running == 0
    assert len(llm.generate(["a"], GREEDY)[0].outputs[0].token_ids) == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_broken_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**SMALL)

    def broken(schedule: Schedule) -> StepOutput:
        raise RuntimeError("no luck")

    monkeypatch.setattr(llm._open().engine._runner, "execute", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        llm.generate(["a"], GREEDY)
    with pytest.raises(EngineDeadError, match=r"failed \(RuntimeError: no luck\)"):
        llm.generate(["a"], GREEDY)


def test_without_a_tokenizer() -> None:
    with LLM(skip_tokenizer_init=True, **SMALL) as llm:
        output = llm.generate([[5, 6, 7]], GREEDY)[0]
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 6)
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.generate("text", GREEDY)


def test_closed_is_closed() -> None:
    llm = LLM(**SMALL)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", GREEDY)


def test_several_live_side_by_side(llm: LLM) -> None:
    with LLM(seed=1, **SMALL) as other:
        assert tokens(other.generate("import", GREEDY)) == tokens(llm.generate("import", GREEDY))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_length"):
        LLM(max_model_length=5)


def resident_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not tell anonymous memory")


def test_a_dropped_one_gives_its_memory_back() -> None:
    """Six models one after another cost less than two more than two of them.

    The heap keeps the room of one that is gone, or doesn't: 21 to 36 MB, up and down.
    """

    def cycle() -> "weakref.ref[Any]":
        llm = LLM(**SMALL)
        llm.generate("import os", GREEDY)
        return weakref.ref(llm._open().engine)

    for _ in range(2):
        cycle()
    gc.collect()
    before = resident_bytes()
    watched = [cycle() for _ in range(6)]
    gc.collect()
    assert [w() for w in watched] == [None] * 6
    assert resident_bytes() - before < 52_000_000


def test_importing_the_package_is_cheap() -> None:
    """No torch until an engine is asked for; the public names are there."""
    code = (
        "import sys, moestro; assert 'torch' not in sys.modules; "
        "from moestro import SamplingParams, EngineConfig, RequestOutput, AsyncEngine; "
        "assert 'torch' not in sys.modules; assert moestro.__version__; "
        "from moestro import LLM; assert LLM.__name__ == 'LLM'; "
        "assert set(moestro.__all__) <= set(dir(moestro))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_builds_an_engine_of_its_own() -> None:
    """torch's OpenMP has computed in the parent: its threads are missing in the child."""
    code = (
        "import os, torch; from moestro import LLM, SamplingParams; "
        "params = SamplingParams(max_tokens=4, temperature=0.0); "
        "options = dict(num_threads=2, weight_cache='off', max_model_len=64, "
        "kv_cache_memory_bytes='4MiB', max_num_seqs=2); "
        "ids = lambda: LLM(**options).generate('def f', params)[0].outputs[0].token_ids; "
        "torch.set_num_threads(2); torch.ones(1 << 20).sin(); "
        "expected = ids(); child = os.fork(); found = ids(); "
        "os._exit(found != expected) if not child else None; "
        "assert found == expected; assert os.waitpid(child, 0)[1] == 0"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_unknown_names_are_attribute_errors() -> None:
    import moestro

    with pytest.raises(AttributeError, match="Llm"):
        _ = moestro.Llm
