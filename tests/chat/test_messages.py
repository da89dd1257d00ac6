"""What a conversation must look like before a template sees it."""

from typing import Any

import pytest

from moestro.chat.messages import check_messages
from moestro.errors import RequestError


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_tool_arguments_become_objects_and_the_original_stays() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    checked = check_messages([message])[0]
    assert checked["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'


def test_other_fields_pass() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "why", "name": "n"}
    assert check_messages([message]) == [message]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        ("hello", "messages", "must be a list"),
        (["hello"], "messages[0]", "must be an object"),
        ([{"content": "x"}], "messages[0].role", "must be one of system"),
        ([{"role": "bot", "content": "x"}], "messages[0].role", "'bot'"),
        ([{"role": "user"}], "messages[0].content", "NoneType"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]", "int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "text parts only",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0]",
            "must be JSON",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]", "`function`"),
    ],
)
def test_refusals_name_the_place(messages: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_messages(messages)
    assert refused.value.param == param
    assert words in str(refused.value)


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' * 100_000, "9" * 5000])
def test_arguments_that_no_parser_takes(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError, match="must be JSON"):
        check_messages([{"role": "assistant", "tool_calls": [call]}])
