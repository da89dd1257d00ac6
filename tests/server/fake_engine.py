"""An engine that answers at once with tokens that can be told in advance."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes.hinted_cache import HintedCacheFake

from moestro.core.kv_hints import HintAction, HintAnswer, HintRequest, MissReason, PrefixUse
from moestro.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTiming
from moestro.core.request import FinishReason
from moestro.core.sampling_params import SamplingParams
from moestro.engine.input_processor import Prompt
from moestro.errors import EngineDeadError, RequestError

TIMING = RequestTiming(
    queue_s=0.5,
    prefill_s=1.0,
    decode_s=2.0,
    first_token_s=1.5,
    prefix=PrefixUse(
        device_tokens=64,
        host_tokens=128,
        load_host_s=0.25,
        miss=MissReason.DIFFERS,
        first_difference=200,
    ),
)


class LetterTokenizer:
    """Token i is the i-th letter."""

    def encode(self, text: str) -> list[int]:
        return [(ord(c) - ord("a")) % 26 for c in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + i) for i in token_ids)


@dataclass
class Call:
    """One generate() as it arrived, and what became of it."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    options: dict[str, Any]
    num_yielded: int = 0
    aborted: bool = False


@dataclass
class FakeEngine:
    """Generates the letters after the prompt's last, one an output, each output a fresh copy.

    gate: when set, waited for before each token. fail_after: die after that many outputs.
    """

    context: int = 100
    gate: asyncio.Event | None = None
    fail_after: int | None = None
    error_after: int | None = None
    cache: HintedCacheFake = field(default_factory=HintedCacheFake)
    dead: bool = False
    calls: list[Call] = field(default_factory=list)
    special_tokens: bool | None = None
    tokenizer: LetterTokenizer = field(default_factory=LetterTokenizer)

    @property
    def is_dead(self) -> bool:
        return self.dead

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        call = Call(prompt, params, request_id, options)
        self.calls.append(call)
        text, ids = self._read(prompt)
        if len(ids) >= self.context:
            raise RequestError("prompt too long", "input_tokens")
        tokens: list[list[int]] = [[] for _ in range(params.n)]
        reasons: list[FinishReason | None] = [None] * params.n
        total = min(params.max_tokens or self.context, self.context - len(ids))
        done = False
        try:
            for step in range(total):
                await self._wait(step)
                for index in range(params.n):
                    tokens[index].append((ids[-1] + 1 + step + index) % 26)
                    if step == total - 1:
                        reasons[index] = FinishReason.LENGTH
                call.num_yielded += 1
                done = step == total - 1
                yield self._output(call, text, ids, tokens, reasons)
        finally:
            call.aborted = not done

    async def hint(
        self, action: HintAction, prompt: Prompt | None = None, **options: Any
    ) -> HintAnswer:
        await self._wait(0)
        self.special_tokens = options.pop("add_special_tokens")
        ids = None if prompt is None else tuple(self._read(prompt)[1])
        answer = self.cache.hint(HintRequest(action=action, token_ids=ids, **options))
        expires_at = None if answer.expires_in_s is None else 1000.0 + answer.expires_in_s
        return replace(answer, expires_at=expires_at)

    async def explain(
        self, prompt: Prompt, *, cache_salt: str = "", add_special_tokens: bool = True
    ) -> tuple[int, PrefixUse]:
        self.special_tokens = add_special_tokens
        ids = self._read(prompt)[1]
        told: list[PrefixUse] = []
        self.cache.explain(ids, cache_salt, told.append)
        return len(ids), told[0]

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        assert isinstance(prompt, dict)
        return None, list(prompt["prompt_token_ids"])

    async def _wait(self, step: int) -> None:
        if self.dead or (self.fail_after is not None and step >= self.fail_after):
            self.dead = True
            raise EngineDeadError("The engine has failed: boom at /home/someone/engine.py")
        if self.error_after is not None and step >= self.error_after:
            raise RuntimeError("kaput at 0x7f0011223344")
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)

    def _output(
        self,
        call: Call,
        text: str | None,
        ids: list[int],
        tokens: list[list[int]],
        reasons: list[FinishReason | None],
    ) -> RequestOutput:
        params = call.params
        scored = params.logprobs is not None
        finished = all(reasons)
        hinted = call.options.get("kv_hints") is not None
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self.logprobs(i, params.prompt_logprobs) for i in ids[1:])]
        return RequestOutput(
            request_id=call.request_id,
            prompt=text,
            prompt_token_ids=list(ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    text=self.tokenizer.decode(own),
                    token_ids=list(own),
                    cumulative_logprob=-1.0 * len(own) if scored else None,
                    logprobs=[self.logprobs(i, params.logprobs or 0) for i in own]
                    if scored
                    else None,
                    finish_reason=reasons[index],
                )
                for index, own in enumerate(tokens)
            ],
            finished=finished,
            timing=TIMING if finished else None,
            kv_hints=HintAnswer(8, 1, None, 60.0, 1060.0) if finished and hinted else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=1,
        )

    def logprobs(self, token_id: int, top: int) -> dict[int, Logprob]:
        """The token at rank 3, and the `top` best of letters x, y, z."""
        found = {token_id: Logprob(-3.0, 3, self.tokenizer.decode([token_id]))}
        for rank, other in enumerate((23, 24, 25)[:top], 1):
            if other != token_id:
                found[other] = Logprob(-1.0 * rank, rank, self.tokenizer.decode([other]))
        return found
