"""The token ids every oracle case is run on."""

import numpy as np
import numpy.typing as npt
from tests.oracle.configs import OracleCase
from tests.oracle.weights import draw_tokens

PROMPT_LENGTHS = (24, 1, 17, 23)
GREEDY_TOKENS = 128
TEXT_SHAPE = (48, 128)
"""Sequences and tokens of the text on which bf16 is judged: enough for rare expert flips."""


def prompts_of(case: OracleCase) -> list[npt.NDArray[np.int64]]:
    """One array of token ids a prompt; the first one is continued greedily."""
    tokens = draw_tokens("prompts", case.config["vocab_size"], sum(PROMPT_LENGTHS), case.seed)
    return np.split(tokens, np.cumsum(PROMPT_LENGTHS)[:-1])


def text_of(case: OracleCase) -> npt.NDArray[np.int64]:
    """Token ids of TEXT_SHAPE."""
    sequences, length = TEXT_SHAPE
    tokens = draw_tokens("text", case.config["vocab_size"], sequences * length, case.seed)
    return tokens.reshape(TEXT_SHAPE)


def probes_of(case: OracleCase) -> npt.NDArray[np.int64]:
    """One vocabulary entry a position of the text: the goldens keep HF's logit of it."""
    count = TEXT_SHAPE[0] * TEXT_SHAPE[1]
    return draw_tokens("probes", case.config["vocab_size"], count, case.seed)
