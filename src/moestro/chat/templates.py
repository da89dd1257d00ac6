"""Chat templates as checkpoints carry them: where they are found, and what they are given."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moestro.chat.messages import check_messages
from moestro.chat.sandbox import SandboxedTemplate, TemplateFaultError
from moestro.core.model_config import read_json_object
from moestro.errors import CheckpointError, ConfigError, RequestError, shown

_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_CONTENT_MARK = "moestro-final-message"


class ChatTemplate:
    """A compiled template and the variables a checkpoint gives it (bos_token and its kin).

    `source` is None when the checkpoint has no template: rendering then raises a RequestError
    that names --chat-template, so that everything but chat keeps working. Raises
    TemplateFaultError when `source` is no template.
    """

    def __init__(self, source: str | None, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.variables = dict(variables or {})
        self._compiled = None if source is None else SandboxedTemplate(source)

    @classmethod
    def load(cls, model_dir: Path, override: str | None = None) -> "ChatTemplate":
        """Find the template: `override` (a file or the template itself), chat_template.jinja,
        chat_template.json, or the chat_template of tokenizer_config.json (its default if several).

        Raises ConfigError when the override is a path that does not exist, or not a template, and
        CheckpointError for files of the checkpoint that can't be used.
        """
        config = _read_config(model_dir / "tokenizer_config.json")
        variables = _special_tokens(
            {**_read_config(model_dir / "special_tokens_map.json"), **config}
        )
        if override is not None:
            return cls._from_override(override, variables)
        try:
            return cls(_stored_template(model_dir, config), variables)
        except TemplateFaultError as error:
            raise CheckpointError(
                f"{model_dir}: the chat template is no valid Jinja: {error}. Give a correct one "
                "with --chat-template."
            ) from error

    def with_source(self, override: str) -> "ChatTemplate":
        """Another template (a file or the template itself) with the variables of this one.

        Raises ConfigError as load does.
        """
        return self._from_override(override, self.variables)

    @classmethod
    def _from_override(cls, override: str, variables: Mapping[str, Any]) -> "ChatTemplate":
        inline = any(c in override for c in "{}\n")
        try:
            return cls(override if inline else Path(override).read_text("utf-8"), variables)
        except OSError as error:
            raise ConfigError(
                f"chat_template {shown(override)} is neither a readable file ({error.strerror}) "
                "nor a template (one has braces)."
            ) from error
        except (ValueError, TemplateFaultError) as error:  # ValueError: not UTF-8, a path with NUL
            raise ConfigError(f"chat_template {shown(override)} is no template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
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
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"tools must be a list of objects, got {shown(tools)}.", "tools")
        variables = {
            **self.variables,
            **kwargs,
            "messages": messages,
            "tools": None if tools is None else [dict(t) for t in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(variables)
        except TemplateFaultError as error:
            # a template is a program over the client's own messages: what breaks it is a request
            raise RequestError(
                f"The chat template refused the conversation: {error}", "messages"
            ) from error


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises RequestError when a variable would hide what the template is given anyway."""
    for name in _OWN_ARGUMENTS:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs must not hold {name!r}: it is an argument of its own.",
                "chat_template_kwargs",
            )


def _stored_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    stored = _read_config(model_dir / "chat_template.json").get("chat_template")
    stored = stored or config.get("chat_template")
    if stored is None or isinstance(stored, str):
        return stored
    if isinstance(stored, list) and all(_is_named(item) for item in stored):
        named = {item["name"]: item["template"] for item in stored}
        return named.get("default") or next(iter(named.values()), None)
    raise CheckpointError(
        f"{model_dir}: chat_template must be text, or a list of objects with name and template, "
        f"got {shown(stored)}. Give a correct one with --chat-template."
    )


def _is_named(item: object) -> bool:
    return isinstance(item, Mapping) and all(
        isinstance(item.get(key), str) for key in ("name", "template")
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise CheckpointError(f"Can't read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error.reason}.") from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token, eos_token, ... and token_suffix as text, for the template."""
    variables: dict[str, Any] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and (key.endswith("_token") or key == "token_suffix"):
            variables[key] = text
    return variables


def _read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
