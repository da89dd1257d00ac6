"""Chat templates as checkpoints carry them. The only module that imports jinja2.

The conventions are those of Hugging Face templates: a sandboxed environment, trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from moestro.chat.messages import check_messages
from moestro.errors import CheckpointError, ConfigError, RequestError

_CONTENT_MARK = "moestro-final-message"
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template and the variables a checkpoint gives it (bos_token and its kin).

    `source` is None when the checkpoint has no template: rendering then raises a RequestError
    that names --chat-template, so that everything but chat keeps working.
    """

    def __init__(self, source: str | None, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.variables = dict(variables or {})
        self._compiled = None if source is None else _compile(source)

    @classmethod
    def load(cls, model_dir: Path, override: str | None = None) -> "ChatTemplate":
        """Find the template: `override` (a file or the template itself), chat_template.jinja,
        chat_template.json, or the chat_template of tokenizer_config.json (its default if several).

        Raises ConfigError when the override is a path that does not exist, or not a template.
        """
        config = _read_config(model_dir / "tokenizer_config.json")
        variables = _special_tokens(
            {**_read_config(model_dir / "special_tokens_map.json"), **config}
        )
        if override is not None:
            return cls._from_override(override, variables)
        try:
            return cls(_stored_template(model_dir, config), variables)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{model_dir}: the chat template is no valid Jinja: {error.message} "
                f"(line {error.lineno}). Give a correct one with --chat-template."
            ) from error

    @classmethod
    def _from_override(cls, override: str, variables: Mapping[str, Any]) -> "ChatTemplate":
        inline = any(c in override for c in "{}\n")
        try:
            return cls(override if inline else Path(override).read_text("utf-8"), variables)
        except OSError as error:
            raise ConfigError(
                f"chat_template {override!r} is neither a readable file ({error.strerror}) nor a "
                "template (one has braces)."
            ) from error
        except (UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
            raise ConfigError(f"chat_template {override!r:.200} is no template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as prompt text. kwargs reach the template as variables.

        continue_final_message leaves the last message open, so that the model goes on with it.
        Raises RequestError: no template, malformed messages, or whatever the template refuses.
        """
        if self._compiled is None:
            raise RequestError(
                "This model's checkpoint has no chat template. Give one with --chat-template "
                "(chat_template= in Python), or send a plain prompt to completions.",
                "messages",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one.",
                "continue_final_message",
            )
        checked = check_messages(messages)
        if continue_final_message:
            final = checked[-1].get("content") or ""
            checked[-1]["content"] = final + _CONTENT_MARK
        text = self._expand(checked, tools, add_generation_prompt, kwargs)
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(_CONTENT_MARK)
        if not mark:
            raise RequestError(
                "The chat template leaves out the end of the last message; it can't be continued.",
                "continue_final_message",
            )
        return head

    def _expand(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        assert self._compiled is not None
        variables = {
            **self.variables,
            **kwargs,
            "messages": messages,
            "tools": None if tools is None else [dict(t) for t in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(variables)
        except _TEMPLATE_FAULTS as error:
            # a template is a program over the client's own messages: what breaks it is a request
            raise RequestError(
                f"The chat template refused the conversation: {error}", "messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a trainer learns; here it is text."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(spec: str) -> str:
    return datetime.datetime.now().strftime(spec)


def _stored_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    stored = _read_config(model_dir / "chat_template.json").get("chat_template")
    stored = stored or config.get("chat_template")
    if isinstance(stored, list):
        named = {t["name"]: t["template"] for t in stored}
        return named.get("default") or next(iter(named.values()), None)
    return stored if isinstance(stored, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token, ... and token_suffix as text, for the template."""
    variables: dict[str, Any] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and (key.endswith("_token") or key == "token_suffix"):
            variables[key] = text
    return variables


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    return loaded if isinstance(loaded, dict) else {}
