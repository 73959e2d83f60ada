"""Virtual time: what is to happen, in the order of its time. Knows nothing of what that is."""

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Agenda:
    """Acts wait here for their time, in seconds since the world began. Those of one moment keep their order."""

    __slots__ = ("_acts", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._acts: list[tuple[float, int, Act]] = []
        self._serial = 0

    def at(self, time_s: float, act: Act) -> None:
        """Does `act` at `time_s`, at once if that has passed."""
        self._serial += 1
        heappush(self._acts, (max(time_s, self.now), self._serial, act))

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now + delay_s, act)

    def step(self) -> bool:
        """Does what comes next. False: there is nothing more to do."""
        if not self._acts:
            return False
        self.now, _, act = heappop(self._acts)
        act()
        return True
