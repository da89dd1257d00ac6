"""GrammarDriver: runs matchers so that a broken one ends its own sequence and nothing else."""

from moestro.core.grammar import GrammarCompiler, GrammarMatcher
from moestro.core.request import Request, Sequence
from moestro.errors import MoestroError, RequestError
from moestro.scheduler.completion import is_stop_allowed


class GrammarError(MoestroError):
    """The grammar of one sequence can't go on; the message says why."""


class GrammarDriver:
    """Makes matchers when they are first needed, fills masks, advances by sampled tokens."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size

    def check(self, request: Request) -> None:
        """Raise RequestError if the request wants a grammar and there is no compiler."""
        if request.params.grammar is not None and self._compiler is None:
            raise RequestError(
                f"This engine has no grammar support, got a {request.params.grammar.kind} grammar: "
                "leave it out.",
                "grammar",
            )

    def allowed_tokens(self, seq: Sequence) -> bytes:
        """The mask for the next token of `seq`. Raises GrammarError."""
        try:
            matcher = self._matcher(seq)
            mask = bytearray((self._vocab_size + 7) // 8)
            if matcher.is_done():
                self._allow_stop_tokens(mask, seq)
            else:
                matcher.fill_mask(mask)
        except Exception as error:
            raise GrammarError(f"The grammar matcher failed: {error!r}.") from error
        if not is_stop_allowed(seq.request, seq.num_output_tokens):
            # The runner suppresses them too; here it shows whether anything is left.
            _clear(mask, seq.request.stop_token_ids)
            if not any(mask):
                raise GrammarError(
                    "The grammar allows no token here but stop tokens, which "
                    f"min_tokens={seq.request.params.min_tokens} forbids."
                )
        if not any(mask):
            raise GrammarError("The grammar allows no token here.")
        return bytes(mask)

    def accept(self, seq: Sequence, token_id: int) -> None:
        """Advance by the token just appended to `seq`. Raises GrammarError."""
        assert seq.matcher is not None
        try:
            accepted = seq.matcher.accept(token_id)
        except Exception as error:
            raise GrammarError(f"The grammar matcher failed: {error!r}.") from error
        if not accepted:
            raise GrammarError(f"The grammar refused the sampled token {token_id}.")

    def must_end(self, seq: Sequence) -> bool:
        """True when the grammar is complete and no stop token could say so. Raises GrammarError."""
        assert seq.matcher is not None
        try:
            done = seq.matcher.is_done()
        except Exception as error:
            raise GrammarError(f"The grammar matcher failed: {error!r}.") from error
        return done and not _can_stop(seq)

    def _matcher(self, seq: Sequence) -> GrammarMatcher:
        if seq.matcher is None:
            spec = seq.request.params.grammar
            assert spec is not None
            assert self._compiler is not None
            seq.matcher = self._compiler(spec, self._vocab_size)
        return seq.matcher

    def _allow_stop_tokens(self, mask: bytearray, seq: Sequence) -> None:
        if _can_stop(seq):
            for token_id in seq.request.stop_token_ids:
                mask[token_id >> 3] |= 1 << (token_id & 7)


def _can_stop(seq: Sequence) -> bool:
    stop_ids = seq.request.stop_token_ids
    return bool(stop_ids) and is_stop_allowed(seq.request, seq.num_output_tokens)


def _clear(mask: bytearray, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        if token_id >> 3 < len(mask):
            mask[token_id >> 3] &= ~(1 << (token_id & 7))
