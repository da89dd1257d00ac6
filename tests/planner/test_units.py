"""Bytes for people are decimal."""

import pytest

from moestro.planner.units import gigabytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (26_368_000, "26.4 MB"),
        (2**32, "4.29 GB"),
        (597_572_311_552, "597.6 GB"),
        (10**12, "1.00 TB"),
    ],
)
def test_units(num_bytes: int, text: str) -> None:
    assert gigabytes(num_bytes) == text
