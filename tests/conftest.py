"""Hypothesis profiles: ``quick`` (default), ``thorough`` (make laws) and ``mutants``."""

from hypothesis import HealthCheck, Phase, settings

_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=_SLOW_MACHINES
)
settings.register_profile(
    "thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW_MACHINES
)
settings.register_profile(
    "mutants",
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=_SLOW_MACHINES,
)
settings.load_profile("quick")
