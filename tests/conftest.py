"""Settings that all tests share: properties are reproducible and never judged by the clock."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvcoord",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvcoord")
