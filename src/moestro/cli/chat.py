"""`moestro chat`: a conversation in the terminal."""

import argparse
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moestro.cli.console import add_common_flags, note, start_logging, write_text
from moestro.cli.outcome import raise_failed
from moestro.cli.sampling_flags import (
    add_sampling_flags,
    refuse_without_effect,
    sampling_overrides_from_args,
)
from moestro.config import add_engine_flags, engine_config_from_args
from moestro.core.sampling_params import SamplingParams
from moestro.errors import GenerationError, RequestError

if TYPE_CHECKING:
    from moestro.cli.local_engine import LocalEngine

HELP = "talk to a model in the terminal"
DESCRIPTION = (
    "A conversation: each line is a message, answers stream. With piped input every line is "
    "answered in turn. --max-tokens is the checkpoint's max_new_tokens unless given, else what the "
    "context leaves."
)
COMMANDS = (
    "/exit ends, /reset forgets the conversation, /system TEXT sets the system prompt (and "
    "forgets), /help shows this. Ctrl-C stops an answer."
)
_NOT_IN_CHAT = {
    "n": "a conversation goes on from one answer",
    "logprobs": "chat shows text only; generate --json shows log probabilities",
    "prompt_logprobs": "chat shows text only; generate --json shows log probabilities",
    "detokenize": "chat shows text only",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro chat`."""
    add_engine_flags(parser, positional_model=True)
    add_sampling_flags(parser, {"max_tokens": "the checkpoint's, else what the context leaves"})
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, answer, repeat, until /exit or the end of input."""
    from moestro.cli.local_engine import LocalEngine

    start_logging(args, plain=True)
    config = engine_config_from_args(args)
    overrides = sampling_overrides_from_args(args)
    refuse_without_effect(overrides, SamplingParams(), _NOT_IN_CHAT)
    with LocalEngine(config) as local:
        max_tokens = local.engine.default_max_tokens
        params = local.engine.default_params.with_(**{"max_tokens": max_tokens, **overrides})
        conversation = Conversation(local, params, args.system)
        conversation.check_template()
        if sys.stdin.isatty():
            note(f"{config.model}. {COMMANDS}")
        while (line := _read_line()) is not None:
            if not conversation.take(line):
                break
    return 0


@dataclass(slots=True)
class Conversation:
    """The messages so far, and what a line of input does to them."""

    local: "LocalEngine"
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def check_template(self) -> None:
        """Raises RequestError at once when the model can't chat."""
        if self.local.engine.chat_template.source is None:
            self.local.engine.chat_template.render([{"role": "user", "content": ""}])

    def take(self, line: str) -> bool:
        """Obey or answer one line; False ends the conversation."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.messages.clear()
                note("forgotten")
            case "/system":
                self.system = rest.strip() or None
                self.messages.clear()
                note("system prompt set" if self.system else "no system prompt")
            case "/help":
                note(COMMANDS)
            case _ if command.startswith("/") and command[1:].isalpha():
                note(f"unknown command {command}. {COMMANDS}")
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        from moestro.cli.text_writer import TextWriter

        before = len(self.messages)
        self.messages.append({"role": "user", "content": line})
        opening = [{"role": "system", "content": self.system}] if self.system else []
        writer = TextWriter()
        try:
            prompt = self.local.engine.chat_template.render([*opening, *self.messages])
            last = self.local.stream(prompt, self.params, writer.show, add_special_tokens=False)
            raise_failed([last] if last is not None else [])
        except (RequestError, GenerationError) as error:
            del self.messages[before:]
            if not sys.stdin.isatty():
                raise
            note(f"error: {error}")
            return
        except KeyboardInterrupt:
            del self.messages[before:]
            if not sys.stdin.isatty():
                raise
            write_text("\n")
            note("stopped; the last message is forgotten")
            return
        text = last.outputs[0].text if last is not None else ""
        self.messages.append({"role": "assistant", "content": text})


def _read_line() -> str | None:
    """The next line without its end; None at the end of input."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
