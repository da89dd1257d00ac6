"""A vocabulary small enough to reason about: one token a byte, two specials, a few words."""

from collections.abc import Iterable


class ByteVocabulary:
    """Ids 0..255 are bytes, EOS is special, MARK is added but not special, words follow."""

    EOS, MARK, SIZE = 256, 257, 258

    def __init__(self, words: tuple[str, ...] = ()) -> None:
        self._words = {self.SIZE + n: w.encode() for n, w in enumerate(words)}

    def word_id(self, n: int) -> int:
        return self.SIZE + n

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        fixed = {self.EOS: b"<eos>", self.MARK: b"<think>"}
        return fixed.get(token_id) or self._words.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id == self.EOS

    def token_to_piece(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")
