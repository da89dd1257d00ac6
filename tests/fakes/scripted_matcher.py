"""Grammar matchers that follow a script instead of a grammar."""

from dataclasses import dataclass, field

from moestro.core.grammar import GrammarMatcher, GrammarSpec
from moestro.errors import RequestError


@dataclass
class ScriptedMatcher:
    """Allows exactly one set of tokens at each place of its script, then is done.

    raise_at: the place at which fill_mask raises. refuse_at: the place whose token accept
    refuses although the mask allowed it. Both None: a matcher that works.
    """

    script: list[set[int]]
    raise_at: int | None = None
    refuse_at: int | None = None
    accepted: list[int] = field(default_factory=list)

    def fill_mask(self, mask: bytearray) -> None:
        place = len(self.accepted)
        if place == self.raise_at:
            raise ValueError(f"scripted failure at {place}")
        mask[:] = bytes(len(mask))
        for token_id in self.script[place]:
            mask[token_id >> 3] |= 1 << (token_id & 7)

    def accept(self, token_id: int) -> bool:
        place = len(self.accepted)
        if place == self.refuse_at or self.is_done() or token_id not in self.script[place]:
            return False
        self.accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]

    def is_done(self) -> bool:
        return len(self.accepted) == len(self.script)


def compile_script(spec: GrammarSpec, vocab_size: int) -> GrammarMatcher:
    """A GrammarCompiler for specs of kind `scripted`.

    The source is one item a place, separated by spaces: token ids joined by `|`, `!` before a
    place where fill_mask raises, `-` before one whose token is refused. "3|4 -7" allows 3 or 4,
    then 7, and refuses that 7.
    """
    if spec.kind != "scripted":
        raise RequestError(f"Only scripted grammars here, got {spec.kind}.", "grammar")
    matcher = ScriptedMatcher([])
    for place, item in enumerate(spec.source.split()):
        if item[0] == "!":
            matcher.raise_at = place
        if item[0] == "-":
            matcher.refuse_at = place
        ids = {int(part) for part in item.lstrip("!-").split("|")}
        if max(ids) >= vocab_size:
            raise RequestError(f"Token {max(ids)} is beyond the vocabulary.", "grammar")
        matcher.script.append(ids)
    return matcher
