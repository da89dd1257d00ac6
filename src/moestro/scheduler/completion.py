"""When a request may begin and when a sequence ends."""

from moestro.core.request import FinishReason, Request, Sequence
from moestro.errors import CapacityError, RequestError
from moestro.scheduler.budget import SchedulerLimits


def check_prompt(request: Request, limits: SchedulerLimits, capacity_tokens: int) -> None:
    """Raise RequestError or CapacityError for a prompt that can never run."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("The prompt is empty: give at least one token.", "prompt")
    if num_tokens >= limits.max_model_len:
        raise RequestError(
            f"The prompt has {num_tokens} tokens; the context of {limits.max_model_len} "
            "must hold it and one more. Shorten the prompt.",
            "prompt",
        )
    if num_tokens > capacity_tokens:
        raise CapacityError(
            f"The prompt has {num_tokens} tokens, the KV memory holds {capacity_tokens}. "
            "Shorten the prompt or give more KV memory."
        )


def is_stop_allowed(request: Request, num_output_tokens: int) -> bool:
    """Whether a stop token may end a sequence that has generated this many tokens before it."""
    return num_output_tokens >= request.params.min_tokens


def check_finish(
    seq: Sequence, token_id: int, max_len: int
) -> tuple[FinishReason, int | None] | None:
    """Reason and stop_reason if `token_id`, the last of seq.token_ids, ends it; else None.

    stop_reason is the id for the user's own stop tokens and None for eos. `max_len` is the
    longest a sequence may become (context or KV memory).
    """
    request = seq.request
    num_output = len(seq.token_ids) - len(request.prompt_token_ids)
    if token_id in request.stop_token_ids and is_stop_allowed(request, num_output - 1):
        is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
        return FinishReason.STOP, None if is_eos else token_id
    if num_output >= request.max_tokens or len(seq.token_ids) >= max_len:
        return FinishReason.LENGTH, None
    return None
