"""Which drafts a model would have said itself."""

from collections.abc import Sequence


def num_said(draws: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of `draws` are tokens of the sequence: the accepted drafts and one more.

    draws[j] is the model's own draw behind drafts[:j], so it counts when all of those were drawn
    too. That draw's noise belongs to its position: what is said is what would have been said
    without drafts, and a draft that is one token is accepted as often as by rejection sampling
    (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192).
    """
    for at, draft in enumerate(drafts):
        if draws[at] != draft:
            return at + 1
    return len(drafts) + 1
