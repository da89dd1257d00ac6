"""The counter-based noise: known answers, accuracy, uniformity, tails, independence."""

import math

import numpy as np
import pytest
import torch

from moestro.ops import noise

MASK = (1 << 64) - 1
KEY = 5036582344713433737
BITS = [863328371039764114, -689605076138541360, -2777777193413105642, -8177867993418917413]
GUMBELS = [
    "-0x1.1e7801ebdb728p+0",
    "0x1.a23e918a1e7d5p+1",
    "0x1.d00ff639f9217p+0",
    "0x1.11d4ea732ce50p-1",
]


def chi_square_bound(degrees: int, z: float = 4.5) -> float:
    """The value that chi-square exceeds once in 300,000 (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def bits_of(count: int, key: int, begin: int = 0) -> np.ndarray:
    ids = torch.arange(begin, begin + count)
    return noise.noise_bits(ids, key).numpy().view(np.uint64)


def test_bits_are_the_published_splitmix64_stream():
    """Outputs for seed 1234567 as Rosetta Code lists them."""
    assert bits_of(5, 1234567).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_are_a_chain_of_three_mixes():
    def mix(z: int) -> int:
        return int(bits_of(1, z)[0])

    for seed, index, position in ((0, 0, 0), (1, 2, 3), (2**64 - 1, 127, 262143), (-5, 0, 9)):
        expected = mix(mix(mix(seed & MASK) ^ index) ^ position)
        assert noise.noise_key(seed, index, position) == expected
    assert noise.noise_key(-1, 0, 0) == noise.noise_key(2**64 - 1, 0, 0)


def test_known_answers():
    """Frozen: another value here means other tokens for every seeded user."""
    key = noise.noise_key(42, 1, 1000)
    ids = torch.tensor([0, 1, 2, 151668])
    assert key == KEY
    assert noise.noise_bits(ids, key).tolist() == BITS
    assert [x.hex() for x in noise.gumbel_noise(ids, key).tolist()] == GUMBELS


def test_extremes_are_finite_and_exact():
    bits = torch.tensor([0, (1 << 11) - 1, 1 << 11, -1])
    u = noise.uniform(bits)
    assert u.tolist() == [2.0**-54, 2.0**-54, 2.0**-53, 1 - 2.0**-53]
    gumbel = -noise.log(-noise.log(u))
    assert gumbel[0] == pytest.approx(-math.log(54 * math.log(2)), rel=1e-14)
    assert gumbel[3] == pytest.approx(53 * math.log(2), rel=1e-14)


def test_logarithm_is_within_3_ulp_of_long_double():
    g = torch.Generator().manual_seed(1)
    x = torch.rand(200_000, dtype=torch.float64, generator=g)
    x = torch.cat((x, 1 - x * 1e-9, 1 + x * 1e-9, x * 1e-15, x * 700, torch.ones(1).double()))
    ours = noise.log(x).numpy()
    exact = np.log(x.numpy().astype(np.longdouble))
    error = np.abs(ours - exact)
    assert (error <= 3 * np.spacing(np.abs(exact).astype(np.float64))).all()
    assert ours[-1] == 0.0


def test_mass_is_the_exponential_in_fixed_point():
    y = -torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 40
    mass = noise.token_mass(y).numpy()
    assert np.abs(mass - np.exp(y.numpy()) * 2.0**44).max() < 3
    edges = torch.tensor([0.0, -30.0, -31.0, -32.0, -1e300, -math.inf], dtype=torch.float64)
    assert noise.token_mass(edges).tolist() == [2**44, 1, 0, 0, 0, 0]
    ordered = noise.token_mass(torch.linspace(-32, 0, 100_001, dtype=torch.float64))
    assert bool((ordered.diff() >= 0).all())


def test_needed_mass_never_exceeds_the_total():
    assert noise.needed_mass(0.5, 10) == 5
    assert noise.needed_mass(0.51, 10) == 6
    assert noise.needed_mass(1e-300, 10) == 1
    assert noise.needed_mass(1 - 2**-53, 2**61 + 255) <= 2**61 + 255


@pytest.mark.parametrize("shift", [56, 48, 40, 32, 24, 16, 11])
def test_every_byte_is_uniform_over_token_ids(shift: int):
    values = (bits_of(1 << 20, noise.noise_key(3, 0, 5)) >> np.uint64(shift)) & np.uint64(255)
    assert _chi_square(values, 256) < chi_square_bound(255)


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_one_token_is_uniform_over_seeds_samples_and_positions(varied: str):
    arguments = {"seed": 11, "sample_index": 0, "position": 0}
    token = torch.tensor([17])
    keys = (noise.noise_key(**(arguments | {varied: i})) for i in range(50_000))
    bits = np.array([int(noise.noise_bits(token, key)) & MASK for key in keys], np.uint64)
    assert _chi_square(bits >> np.uint64(56), 256) < chi_square_bound(255)


@pytest.mark.parametrize(
    "other", [(12, 0, 5), (11, 1, 5), (11, 0, 6), (11 + 2**32, 0, 5), (11, 0, 5 + 2**20)]
)
def test_neighbouring_keys_give_independent_noise(other: tuple[int, int, int]):
    count = 1 << 19
    mine = bits_of(count, noise.noise_key(11, 0, 5))
    theirs = bits_of(count, noise.noise_key(*other))
    cells = ((mine >> np.uint64(60)) << np.uint64(4)) | (theirs >> np.uint64(60))
    assert _chi_square(cells, 256) < chi_square_bound(255)
    flipped = np.unpackbits((mine ^ theirs).view(np.uint8)).reshape(count, 64).mean(axis=0)
    assert np.abs(flipped - 0.5).max() < 5 * 0.5 / math.sqrt(count)


def test_upper_tail_has_the_right_weight():
    """Counts of noise above t, 40 million values, against 1 - exp(-exp(-t))."""
    bounds = (10.0, 12.0, 14.0, 16.0)
    counts = np.zeros(len(bounds))
    total = 0
    for key in range(40):
        u = (bits_of(1_000_000, noise.noise_key(key, 0, 0)) >> np.uint64(11)) * 2.0**-53
        total += len(u)
        counts += [np.count_nonzero(u > math.exp(-math.exp(-t))) for t in bounds]
    expected = np.array([-math.expm1(-math.exp(-t)) for t in bounds]) * total
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected) + 1).all(), (counts, expected)


def test_gumbel_moments():
    values = noise.gumbel_noise(torch.arange(400_000), noise.noise_key(7, 0, 0))
    assert float(values.mean()) == pytest.approx(0.5772156649, abs=4.5 * 1.2825 / 632)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, rel=0.015)


def _chi_square(values: np.ndarray, cells: int) -> float:
    counts = np.bincount(values.astype(np.int64), minlength=cells)
    expected = len(values) / cells
    return float(((counts - expected) ** 2).sum() / expected)
