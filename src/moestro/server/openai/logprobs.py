"""Log probabilities in the three shapes of the API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moestro.core.outputs import Logprob

Position = Mapping[int, Logprob]

LOWEST = -9999.0
"""JSON has no infinity: what has no probability at all is told as this."""


def chat_logprobs(positions: Sequence[Position], top_logprobs: int) -> dict[str, Any]:
    """choices[].logprobs of a chat completion; the sampled token comes first in a position."""
    content = []
    for position in positions:
        sampled = next(iter(position.values()))
        best = [_chat_entry(lp) for lp in _best(position, top_logprobs)]
        content.append({**_chat_entry(sampled), "top_logprobs": best})
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[Position | None],
    token_ids: Sequence[int],
    top: int,
    text_offset: int,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """choices[].logprobs of a text completion. A position of None (the prompt's first) is null.

    text_offset: characters of the answer before the first position. decode: for that None.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = position[token_id] if position else None
        text = token_text(token_id, entry) if entry else decode([token_id])
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        token_logprobs.append(finite(entry.logprob) if entry else None)
        top_logprobs.append(_top_by_text(position, entry, text, top) if position else None)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def prompt_logprobs(
    positions: Sequence[Position | None] | None,
) -> list[dict[str, Any] | None] | None:
    """prompt_logprobs of either route: token id -> logprob, rank, decoded_token."""
    if positions is None:
        return None
    return [
        {
            str(token): {
                "logprob": finite(lp.logprob),
                "rank": lp.rank,
                "decoded_token": lp.decoded_token,
            }
            for token, lp in position.items()
        }
        if position
        else None
        for position in positions
    ]


def finite(logprob: float) -> float:
    """The logprob, or the lowest that is told."""
    return max(logprob, LOWEST)


def token_text(token_id: int, entry: Logprob | None) -> str:
    """The token's text; its id where there is none (no tokenizer)."""
    if entry is None or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


def _best(position: Position, top: int) -> list[Logprob]:
    """The `top` most likely entries, best first; the sampled token only if it is one of them."""
    ranked = sorted(position.values(), key=lambda lp: (lp.rank or 0, -lp.logprob))
    return ranked[:top]


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": text,
        "logprob": finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _top_by_text(
    position: Position, sampled: Logprob | None, text: str, top: int
) -> dict[str, float]:
    """The most likely tokens by text, and the sampled one; of equal texts the best stays."""
    told: dict[str, float] = {}
    for token_id, entry in position.items():
        if entry.rank is None or entry.rank <= top:
            key = token_text(token_id, entry)
            told[key] = max(told.get(key, LOWEST), finite(entry.logprob))
    if sampled is not None:
        told.setdefault(text, finite(sampled.logprob))
    return told
