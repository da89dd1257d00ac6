"""Settings for every test: reproducible hypothesis runs, and devices that must be asked for."""

from hypothesis import HealthCheck, settings

# Derandomised so that a red run is red again; deadlines off because shared machines stall.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")
