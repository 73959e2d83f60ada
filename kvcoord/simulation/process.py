"""What all simulated processes have in common: a clock of their own, a life, a pause in which events queue up."""

from collections import deque
from functools import partial
from typing import Final

from kvcoord.simulation.agenda import Act, Agenda

_ROUNDING_S: Final = 1e-6
"""A timer rings this much late, so that a deadline that is converted between two clocks has passed for sure."""


class SkewedClock:
    """A monotonic clock that started at `offset_s` and runs `1 + drift` times as fast as the world's."""

    __slots__ = ("drift", "offset_s")

    def __init__(self, offset_s: float = 0.0, drift: float = 0.0) -> None:
        self.offset_s, self.drift = offset_s, drift

    def local(self, world_s: float) -> float:
        return self.offset_s + world_s * (1.0 + self.drift)

    def world(self, local_s: float) -> float:
        return (local_s - self.offset_s) / (1.0 + self.drift)


class Process:
    """One process. `tick` is what its timer does; subclasses set it by overriding."""

    def __init__(self, name: str, agenda: Agenda, clock: SkewedClock) -> None:
        self.name = name
        self.agenda = agenda
        self.clock = clock
        self.alive = False
        self.paused = False
        self.life = 0
        self.running_since = 0.0
        """World time of the last start or resumption: whoever waits for this process waits from then on."""
        self._backlog: deque[Act] = deque()
        self._alarm_at = float("inf")

    def now(self) -> float:
        """This process's own time."""
        return self.clock.local(self.agenda.now)

    def tick(self) -> None:
        """The timer rang."""

    def born(self) -> None:
        """A new life."""
        self.life += 1
        self.alive, self.paused = True, False
        self.running_since = self.agenda.now
        self._alarm_at = float("inf")

    def killed(self) -> None:
        """Ends at once; what was queued for it is lost."""
        self.life += 1
        self.alive = self.paused = False
        self._backlog.clear()

    def take(self, act: Act) -> None:
        """An event: now, or after the pause, or never."""
        if self.paused:
            self._backlog.append(act)
        elif self.alive:
            act()

    def pause(self) -> None:
        self.paused = self.alive

    def resume(self) -> None:
        """Goes on with the events of the pause in their order, then with the timer."""
        if not self.paused:
            return
        self.paused = False
        self.running_since = self.agenda.now
        backlog, self._backlog = self._backlog, deque()
        for act in backlog:
            self.take(act)
        if self.alive:
            self.tick()

    def set_alarm(self, deadline_s: float | None) -> None:
        """Ticks at this local time, unless it will tick earlier anyway."""
        if deadline_s is None:
            return
        at = max(self.clock.world(deadline_s), self.agenda.now) + _ROUNDING_S
        if at < self._alarm_at:
            self._alarm_at = at
            self.agenda.at(at, partial(self._rang, self.life, at))

    def _rang(self, life: int, at: float) -> None:
        if life != self.life or at != self._alarm_at:
            return
        self._alarm_at = float("inf")
        self.take(self._tick_alive)

    def _tick_alive(self) -> None:
        if self.alive:
            self.tick()
