"""Settings that all tests share: properties are reproducible and never judged by the clock."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvcoord",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvcoord")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell. Children inherit it: ctrl-C would mean nothing to them until they serve.
    signal.signal(signal.SIGINT, signal.default_int_handler)
