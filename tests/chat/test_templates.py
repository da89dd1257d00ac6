"""Templates render by the conventions checkpoints rely on, and refuse with a message."""

import json
from pathlib import Path
from typing import Any

import pytest

from moestro.chat.templates import ChatTemplate
from moestro.errors import CheckpointError, ConfigError, RequestError

USER = [{"role": "user", "content": "hi"}]


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source).render(USER, **kwargs)


def test_blocks_are_trimmed() -> None:
    source = "  {% if true %}\nA\n  {% endif %}\nB"
    assert render(source) == "A\nB"


def test_loop_controls_and_namespace() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
    )
    assert render(source) == "6"


def test_tojson_keeps_characters_and_html() -> None:
    tool = {"name": "f", "note": "<caf\u00e9> & 'x'"}
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    indented = json.dumps(tool, indent=2, ensure_ascii=False)
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=[tool]) == indented


def test_generation_tag_is_text() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_strftime_now() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_raise_exception_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.missing() }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_breaks_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="refused the conversation"):
        render(source)


def test_keyword_arguments_reach_the_template_but_not_its_messages() -> None:
    source = "{{ reasoning_effort }} {{ messages | length }} {{ add_generation_prompt }}"
    assert render(source, reasoning_effort="high") == "high 1 True"


def test_no_template_names_the_option() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate(None).render(USER)


def test_continue_final_message_leaves_it_open() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    template = ChatTemplate(source)
    messages = [*USER, {"role": "assistant", "content": "so"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<hi><so"
    assert messages[-1]["content"] == "so"
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves out the end"):
        ChatTemplate("x").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_special_tokens_and_suffix_are_variables(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "token_suffix": ":open",
        "chat_template": "{{ bos_token }}{{ token_suffix }}{{ eos_token }}",
    }
    write(tmp_path, "tokenizer_config.json", config)
    assert ChatTemplate.load(tmp_path).render(USER) == "<s>:open</s>"


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path).source is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert ChatTemplate.load(tmp_path).source == "D"
    write(tmp_path, "chat_template.json", {"chat_template": "J"})
    assert ChatTemplate.load(tmp_path).source == "J"
    write(tmp_path, "chat_template.jinja", "F")
    assert ChatTemplate.load(tmp_path).source == "F"
    write(tmp_path, "mine.jinja", "M")
    assert ChatTemplate.load(tmp_path, str(tmp_path / "mine.jinja")).source == "M"
    assert ChatTemplate.load(tmp_path, "{{ 1 }}").source == "{{ 1 }}"


def test_bad_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a readable file"):
        ChatTemplate.load(tmp_path, "nowhere.jinja")
    with pytest.raises(ConfigError, match="is no template"):
        ChatTemplate.load(tmp_path, "{% if %}")
    write(tmp_path, "chat_template.jinja", "{% for %}")
    with pytest.raises(CheckpointError, match="no valid Jinja"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, "tokenizer_config.json", "{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "stored", [5, {"a": 1}, [{"name": "default"}], ["text"], [{"name": 1, "template": "x"}]]
)
def test_stored_templates_of_wrong_shapes(tmp_path: Path, stored: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": stored})
    with pytest.raises(CheckpointError, match="chat_template must be text"):
        ChatTemplate.load(tmp_path)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ConfigError, match="is no template"):
        ChatTemplate.load(tmp_path, str(tmp_path / "chat_template.jinja"))
    with pytest.raises(ConfigError, match="is no template"):
        ChatTemplate.load(tmp_path, "a\0b")


def test_tools_are_objects() -> None:
    with pytest.raises(RequestError, match="tools must be a list of objects"):
        render("x", tools=[5])


def test_variables_may_have_any_name() -> None:
    assert render("{{ self_ }}{{ messages | length }}", self_=1, self=2, messages=3) == "11"


QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def test_chatml_with_tools_and_switches() -> None:
    text = render(QWEN_LIKE, tools=[{"name": "f"}], enable_thinking=False)
    assert text == (
        '<|im_start|>system\n\n{"name": "f"}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
