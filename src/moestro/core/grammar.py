"""How constrained decoding enters the engine: a spec travels; its user makes the matcher."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must match, as data; `kind`: json_schema, regex, choice, grammar, ..."""

    kind: str
    source: str


class GrammarMatcher(Protocol):
    """The state of one sequence inside its grammar.

    A mask has one bit per token id, least significant bit first in each byte, 1 = allowed;
    it holds ceil(vocab_size / 8) bytes.
    """

    def fill_mask(self, mask: bytearray) -> None:
        """Overwrite `mask` with the tokens allowed next."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False (and no change) if the grammar refuses it."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    def is_done(self) -> bool:
        """True when only a stop token may follow."""


class GrammarCompiler(Protocol):
    """Turns a spec into a fresh matcher; raises RequestError for a bad spec."""

    def __call__(self, spec: GrammarSpec, vocab_size: int) -> GrammarMatcher: ...
