"""Token ids to text as they come: byte-exact, never half a character, stop strings held back."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moestro.core.sampling_params import SamplingParams
from moestro.engine.stop_strings import StopMatcher


class TokenVocabulary(Protocol):
    """What detokenisation needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text, and the stop string that ended it. num_tokens: how many of the given were used."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """The text of one sequence. The pieces together equal decoding all its ids at once.

    Bytes of an unfinished character wait for the rest, and become U+FFFD when the sequence ends
    without it. Text that may turn into a stop string waits until that is decided.
    """

    def __init__(self, vocabulary: TokenVocabulary, params: SamplingParams) -> None:
        self._vocabulary = vocabulary
        self._skip_special = params.skip_special_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._num_tokens = 0
        self._held = ""

    def feed(
        self, token_ids: Sequence[int], *, last: bool = False, ended_by_token: bool = False
    ) -> TextPiece:
        """Take the next tokens. A found stop string ends the text; nothing may follow it.

        last: the sequence ends here, what waits is given out. ended_by_token: the last id is a
        stop token, whose text is left out unless include_stop_str_in_output.
        """
        pieces: list[str] = []
        hidden = ended_by_token and not self._keep_stop
        for n, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            skipped = hidden and n == len(token_ids)
            found = self._take(b"" if skipped else self._bytes_of(token_id), False, pieces)
            if found is not None:
                return TextPiece("".join(pieces), n, found)
        found = self._take(b"", True, pieces) if last else None
        if last and found is None:
            pieces.append(self._held)
            self._held = ""
        return TextPiece("".join(pieces), len(token_ids), found)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skip_special and self._vocabulary.is_special(token_id):
            return b""
        return self._vocabulary.token_bytes(token_id)

    def _take(self, data: bytes, final: bool, pieces: list[str]) -> str | None:
        """Decode `data`, append to `pieces` what is safe to show, return the stop string found."""
        text = self._utf8.decode(data, final)
        if self._stops is None:
            pieces.append(text)
            return None
        armed = self._num_tokens > self._min_tokens
        found = self._stops.feed(text, armed=armed)
        if found is not None:
            stop, taken = found
            shown = self._held + text[:taken]
            pieces.append(shown if self._keep_stop else shown[: len(shown) - len(stop)])
            self._held = ""
            return stop
        waiting = self._held + text
        held = 0 if self._keep_stop else self._stops.num_held
        cut = len(waiting) - held
        pieces.append(waiting[:cut])
        self._held = waiting[cut:]
        return None
