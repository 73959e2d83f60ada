"""One timer of the event loop for a machine's next deadline."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` when the deadline set last has passed. Moving it later costs nothing until it would have rung.

    Deadlines are times of the loop's own clock, in seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._armed_at = 0.0
        self._deadline: float | None = None

    def set(self, deadline: float | None) -> None:
        """The next deadline; None for none."""
        self._deadline = deadline
        if deadline is None or (self._handle is not None and self._armed_at <= deadline):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._arm(deadline)

    def close(self) -> None:
        self._deadline = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, deadline: float) -> None:
        self._armed_at = deadline
        self._handle = self._loop.call_at(deadline, self._wake)

    def _wake(self) -> None:
        self._handle = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._arm(self._deadline)
            return
        self._ring()
