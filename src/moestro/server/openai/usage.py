"""Token counts of a response."""

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """How much of the prompt came from a cache."""

    cached_tokens: int


class Usage(BaseModel):
    """What a request cost, in tokens; completion tokens over all of its sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Adds up usage while outputs arrive, for requests of one or several prompts."""

    def __init__(self, num_prompts: int) -> None:
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._generated = [0] * num_prompts

    def saw(self, prompt_index: int, *, prompt: int, cached: int, generated: int) -> None:
        """Set the counts of one prompt so far."""
        self._prompt[prompt_index] = prompt
        self._cached[prompt_index] = cached
        self._generated[prompt_index] = generated

    def usage(self) -> Usage:
        """The sum so far."""
        prompt, generated = sum(self._prompt), sum(self._generated)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached)),
        )
