"""Counter-based sampling noise and the arithmetic of top-p, specified to the bit.

Everything here is made of wrapping 64-bit integer operations and single IEEE float64 operations
(add, subtract, multiply, divide, each rounded on its own: no fused multiply-add, no library log or
exp), so that a body in any language on any device gives the same bits, for any grouping of tokens.

The noise of a token is a function of (seed, sample index, position, token id):

    mix(z)   = finalise(z + GOLDEN)                      all modulo 2^64
    key      = mix(mix(mix(seed) ^ sample_index) ^ position)
    bits(id) = finalise(key + (id + 1) * GOLDEN)         output number id of SplitMix64(key)
    u        = max(bits >> 11, 1/2) * 2^-53              in (0, 1), 53 bits, never 0 or 1
    gumbel   = -log(-log(u))                             in [-3.63, 36.74], log() below

finalise is the output function of SplitMix64 (Steele, Lea and Flood 2014, variant 13 of Stafford):
z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9; z = (z ^ z >>> 27) * 0x94D049BB133111EB; z ^ z >>> 31.
P(u >= 1 - j 2^-53) = j 2^-53 exactly, so a token of probability p >= 1e-12 gets its share.
"""

import math
from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", torch.Tensor, np.ndarray, float)
"""Functions over Array use operators only, which mean the same to torch, numpy and Python."""

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASS_BITS = 44
"""top-p adds probabilities as integers in units of 2^-44 of the most likely token's."""
MIN_EXPONENT = -32.0
"""exp(-32) is below one such unit."""

_MASK = (1 << 64) - 1
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_ATANH_TERMS = tuple(1.0 / (2 * n + 1) for n in range(12))
_EXP_TERMS = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320, 1 / 362880)
_EXP_SQUARINGS = 7


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """The 64-bit key of one draw; seed, a negative one too, counts modulo 2^64.

    position: the absolute position of the token being drawn.
    """
    return _mix(_mix(_mix(seed & _MASK) ^ sample_index) ^ position)


def gumbel_noise(token_ids: torch.Tensor, key: int) -> torch.Tensor:
    """Gumbel(0, 1) noise of each token. token_ids: int64 of any shape. Returns float64."""
    return -log(-log(uniform(noise_bits(token_ids, key))))


def noise_bits(token_ids: torch.Tensor, key: int) -> torch.Tensor:
    """bits(id) of each token as int64 holding the unsigned value. token_ids: int64."""
    z = (token_ids + 1) * signed(GOLDEN) + signed(key)
    z = (z ^ _shift(z, 30)) * signed(MULTIPLIER_1)
    z = (z ^ _shift(z, 27)) * signed(MULTIPLIER_2)
    return z ^ _shift(z, 31)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """u of each int64, float64 in (0, 1)."""
    return _shift(bits, 11).double().clamp(min=0.5) * 2.0**-53


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive finite float64, as log_of_parts defines it."""
    mantissa, exponent = torch.frexp(x)
    return log_of_parts(mantissa, exponent.double())


def log_of_parts(mantissa: Array, exponent: Array) -> Array:
    """log(mantissa * 2^exponent), both float64, mantissa in [1/2, 1). Within 2 ulp.

    With m = mantissa, doubled (and exponent - 1) where it is below sqrt(1/2):
    exponent * ln 2 + 2 s (1 + z / 3 + z^2 / 5 + ... + z^11 / 23), s = (m - 1) / (m + 1), z = s^2,
    the sum by Horner's rule. Near x = 1, exponent is 0 and the result keeps full relative
    precision, which the upper tail of the noise rests on.
    """
    low = (mantissa < _SQRT_HALF) * 1.0
    m = mantissa * (low + 1.0)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = z * _ATANH_TERMS[-1] + _ATANH_TERMS[-2]
    for term in _ATANH_TERMS[-3::-1]:
        total = total * z + term
    result: Array = (exponent - low) * _LN_2 + (s + s) * total
    return result


def scaled_exp(y: Array) -> Array:
    """2^44 exp(y) before rounding down, for float64 y in [-32, 0]; exactly 2^44 at 0.

    exp(y / 128) from ten Taylor terms by Horner's rule, squared seven times.
    """
    r = y * 2.0**-_EXP_SQUARINGS
    total = r * _EXP_TERMS[-1] + _EXP_TERMS[-2]
    for term in _EXP_TERMS[-3::-1]:
        total = total * r + term
    for _ in range(_EXP_SQUARINGS):
        total = total * total
    return total * 2.0**MASS_BITS


def token_mass(y: torch.Tensor) -> torch.Tensor:
    """floor(2^44 exp(y)) as int64 for float64 y <= 0 (-inf included).

    Integers add up to the same total in any order, which makes top-p exact under any batching.
    """
    return scaled_exp(y.clamp(min=MIN_EXPONENT)).long()


def needed_mass(top_p: float, total: int) -> int:
    """The mass that makes up top_p of total: one float64 product, rounded up, at most total."""
    product = top_p * float(total)
    return min(int(product) + (int(product) < product), total)


def log_number(x: float) -> float:
    """log() of one positive number."""
    mantissa, exponent = math.frexp(x)
    return log_of_parts(mantissa, float(exponent))


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(z: int) -> int:
    z = (z + GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift: >> alone would copy the sign bit."""
    return (z >> count) & ((1 << (64 - count)) - 1)
