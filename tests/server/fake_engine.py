"""An engine that answers at once with tokens that can be told in advance."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moestro.core.outputs import CompletionOutput, Logprob, RequestOutput
from moestro.core.request import FinishReason
from moestro.core.sampling_params import SamplingParams
from moestro.engine.input_processor import Prompt
from moestro.errors import EngineDeadError, RequestError


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
    dead: bool = False
    calls: list[Call] = field(default_factory=list)
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
            finished=all(reasons),
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
