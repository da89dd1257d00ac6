"""LLM: offline inference with vLLM's names and types."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from moestro.chat.templates import check_template_kwargs
from moestro.config import EngineConfig
from moestro.core.kv_hints import KVHints
from moestro.core.messages import EngineStats, StepReport
from moestro.core.outputs import RequestOutput
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.engine.build import build_engine
from moestro.engine.built_engine import BuiltEngine
from moestro.engine.engine import Engine
from moestro.engine.input_processor import Prompt, RequestOptions
from moestro.engine.interrupt import deferred_interrupt
from moestro.engine.progress_bar import prompt_progress
from moestro.engine.request_progress import RequestProgress
from moestro.engine.tokenizer import Tokenizer
from moestro.errors import EngineDeadError, RequestError

Params = SamplingParams | Sequence[SamplingParams] | None
Hints = KVHints | Sequence[KVHints | None] | None
Conversation = Sequence[Mapping[str, Any]]


class Rendering(TypedDict, total=False):
    """How a chat template writes conversations; names and meanings are vLLM's.

    chat_template: a file or a template to use in place of the checkpoint's.
    add_generation_prompt: begin the answer (the default). continue_final_message: go on with the
    last message instead. tools: that the model may call. chat_template_kwargs: for the template.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class LLM:
    """A model in this process. Keywords are EngineConfig's fields (docs/config.md).

    close() gives its memory back, as does dropping the last reference. Not for use by several
    threads at once: calls take turns.
    """

    def __init__(
        self,
        model: str = "tiny-hy3",
        *,
        load_progress: Callable[[int, int], None] | None = None,
        graph_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """load_progress: told (bytes read, bytes in all) while weights load; graph_progress: then
        (batch sizes captured, in all). Raises ConfigError, CheckpointError, CapacityError or
        UnsupportedError when the model can't be served.
        """
        config = EngineConfig.from_kwargs(model=model, **options)
        self._start(config, load_progress, graph_progress)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        load_progress: Callable[[int, int], None] | None = None,
        graph_progress: Callable[[int, int], None] | None = None,
    ) -> "LLM":
        """From options that are already one object."""
        made = cls.__new__(cls)
        made._start(config, load_progress, graph_progress)
        return made

    def _start(
        self,
        config: EngineConfig,
        load_progress: Callable[[int, int], None] | None,
        graph_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.config = config
        self._built: BuiltEngine | None = build_engine(config, load_progress, graph_progress)
        self.plan = self._built.plan
        self.spec = self._built.spec
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._ended = "This LLM has been closed"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        kv_hints: Hints = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts.

        prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of
        these. sampling_params: one for all, one a prompt, or None for the checkpoint's defaults.
        use_tqdm: a progress bar, where stderr is a terminal. priority: one a prompt, lower runs
        first. kv_hints: one for all or one a prompt; answered in an output's kv_hints. A bad
        prompt raises RequestError before anything runs.
        """
        items = _as_prompts(prompts)
        options = _options(len(items), priority, kv_hints)
        return self._run(items, sampling_params, use_tqdm, options, add_special_tokens=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        kv_hints: Hints = None,
        **rendering: Unpack[Rendering],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them.

        sampling_params, use_tqdm, priority, kv_hints: see generate. rendering: see Rendering.
        Raises RequestError, one that names --chat-template when there is no template at all.
        """
        prompts = self._rendered(_as_conversations(messages), **rendering)
        options = _options(len(prompts), priority, kv_hints)
        return self._run(prompts, sampling_params, use_tqdm, options, add_special_tokens=False)

    def _rendered(
        self,
        conversations: Sequence[Conversation],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The prompts of conversations; parameters as in Rendering."""
        template = self._open().chat_template
        if chat_template is not None:
            template = template.with_source(chat_template)
        check_template_kwargs(chat_template_kwargs or {})
        return [
            template.render(
                conversation,
                tools,
                add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError under skip_tokenizer_init."""
        tokenizer = self._open().tokenizer
        if tokenizer is None:
            raise RequestError("skip_tokenizer_init is set: there is no tokenizer.")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; generate's default."""
        return self._open().processor.default_params

    @property
    def default_max_tokens(self) -> int | None:
        """The max_new_tokens of the checkpoint's generation_config.json, if it gives any."""
        return self._open().processor.default_max_tokens

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine since it was made."""
        return self._open().engine.stats()

    def close(self) -> None:
        """Drop the model and its memory. Repeatable; any other call then raises EngineDeadError."""
        with self._lock:
            built, self._built = self._built, None
            if built is not None:
                built.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _open(self) -> BuiltEngine:
        if self._built is None:
            raise EngineDeadError(f"{self._ended}; make a new LLM.")
        return self._built

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        use_tqdm: bool,
        options: Sequence[RequestOptions],
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        processor = self._open().processor
        each = _one_each(params, len(prompts))
        with self._lock:
            requests = [
                processor.process(
                    prompt,
                    each[n],
                    request_id=str(next(self._ids)),
                    options=options[n],
                    add_special_tokens=add_special_tokens,
                )
                for n, prompt in enumerate(prompts)
            ]
            return self._complete(requests, use_tqdm)

    def _complete(self, requests: Sequence[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end; whatever interrupts it leaves the engine empty."""
        engine = self._open().engine
        progresses = {r.request_id: RequestProgress(r) for r in requests}
        num_done, num_tokens = 0, 0
        try:
            for request in requests:
                engine.add_request(request)
            with prompt_progress(len(requests), use_tqdm) as bar, deferred_interrupt() as check:
                while engine.has_work():
                    for delta in self._step(engine).deltas:
                        progress = progresses[delta.request_id]
                        progress.add(delta)
                        num_done += progress.finished
                        num_tokens += len(delta.token_ids)
                    bar.advance(num_done, num_tokens)
                    check()
        except BaseException:
            engine.abort_all()
            engine.discard_pending()
            raise
        return [progress.output() for progress in progresses.values()]

    def _step(self, engine: Engine) -> StepReport:
        """One step; after an exception out of it the engine is beyond use and is closed."""
        try:
            return engine.step()
        except BaseException as error:
            self._ended = f"The engine has failed ({type(error).__name__}: {error})"
            self.close()
            raise


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, whatever was given; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts must be text, token ids, or a list of them, got {type(prompts).__name__}.",
            "prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Any]:
    """A list of conversations, whatever was given."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        return [messages]
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            "messages must be a list of messages or a list of such lists.", "messages"
        )
    return list(messages)


def _one_each(params: Params, num_prompts: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    _check_one_each(params, num_prompts, "sampling_params")
    return list(params)


def _options(
    num_prompts: int, priority: Sequence[int] | None, kv_hints: Hints
) -> list[RequestOptions]:
    """One a prompt. Raises RequestError where lists and prompts don't match."""
    if priority is not None:
        _check_one_each(priority, num_prompts, "priority")
    if not isinstance(kv_hints, KVHints | None):
        _check_one_each(kv_hints, num_prompts, "kv_hints")
    return [
        RequestOptions(
            priority=0 if priority is None else priority[n],
            kv_hints=kv_hints if isinstance(kv_hints, KVHints | None) else kv_hints[n],
        )
        for n in range(num_prompts)
    ]


def _check_one_each(given: object, num_prompts: int, name: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RequestError(
            f"{name} must be a list with one entry a prompt, got {type(given).__name__}.", name
        )
    if len(given) != num_prompts:
        raise RequestError(
            f"{name} must have one entry a prompt: {len(given)} for {num_prompts}.", name
        )
