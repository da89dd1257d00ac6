"""Settings for every test: reproducible hypothesis runs, and devices that must be asked for."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Derandomised so that a red run is red again; deadlines off because shared machines stall.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed weights of tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if "MOESTRO_CACHE_DIR" not in os.environ:
            patch.setenv("MOESTRO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
