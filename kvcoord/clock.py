"""Where time comes from. Machines get `now` as an argument and never import this module."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Its zero means nothing; only differences do."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and for the simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        if by_s < 0:
            raise ValueError(f"by_s={by_s}: a monotonic clock never goes back")
        self._now_s += by_s
