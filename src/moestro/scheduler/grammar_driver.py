"""GrammarDriver: runs matchers so that a broken one ends its own sequence and nothing else."""

from contextlib import suppress

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

    def masks(self, seq: Sequence, draft_token_ids: tuple[int, ...] = ()) -> tuple[bytes, ...]:
        """Masks of the next draw of `seq` and of one behind each of its drafts.

        Only as many drafts as the grammar allows and as don't end the sequence; the matcher stays
        where it is. Raises GrammarError when the next draw itself has no mask.
        """
        masks = [self._mask(seq, seq.num_output_tokens)]
        if not draft_token_ids:
            return tuple(masks)
        matcher = self._matcher(seq)
        num_accepted = 0
        # What goes wrong behind a draft may never come to pass: it is told when it does.
        with suppress(Exception):
            for token_id in draft_token_ids:
                if _may_stop_at(seq, num_accepted, token_id) or not _allows(masks[-1], token_id):
                    break
                if not matcher.accept(token_id):
                    break
                num_accepted += 1
                num_output = seq.num_output_tokens + num_accepted
                if matcher.is_done() and not _can_stop(seq, num_output):
                    break
                masks.append(self._mask(seq, num_output))
        try:
            matcher.rollback(num_accepted)
        except Exception as error:
            raise GrammarError(f"The grammar matcher failed: {error!r}.") from error
        return tuple(masks)

    def _mask(self, seq: Sequence, num_output_tokens: int) -> bytes:
        """The mask where the matcher is now. Raises GrammarError."""
        try:
            matcher = self._matcher(seq)
            mask = bytearray((self._vocab_size + 7) // 8)
            if not matcher.is_done():
                matcher.fill_mask(mask)
            elif _can_stop(seq, num_output_tokens):
                for token_id in seq.request.stop_token_ids:
                    mask[token_id >> 3] |= 1 << (token_id & 7)
        except Exception as error:
            raise GrammarError(f"The grammar matcher failed: {error!r}.") from error
        if not is_stop_allowed(seq.request, num_output_tokens):
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
        return done and not _can_stop(seq, seq.num_output_tokens)

    def _matcher(self, seq: Sequence) -> GrammarMatcher:
        if seq.matcher is None:
            spec = seq.request.params.grammar
            assert spec is not None
            assert self._compiler is not None
            seq.matcher = self._compiler(spec, self._vocab_size)
        return seq.matcher


def _can_stop(seq: Sequence, num_output_tokens: int) -> bool:
    stop_ids = seq.request.stop_token_ids
    return bool(stop_ids) and is_stop_allowed(seq.request, num_output_tokens)


def _may_stop_at(seq: Sequence, num_ahead: int, token_id: int) -> bool:
    """Whether `token_id`, with so many drafts before it, would end `seq`."""
    request = seq.request
    return token_id in request.stop_token_ids and is_stop_allowed(
        request, seq.num_output_tokens + num_ahead
    )


def _allows(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _clear(mask: bytearray, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        if token_id >> 3 < len(mask):
            mask[token_id >> 3] &= ~(1 << (token_id & 7))
