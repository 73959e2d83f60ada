"""The engine process of one rank under open-loop load: requests arrive as the trace says, whether it keeps up or not.

Run as `python -m kvcoord.load.bench.arrivals`; its plan is the first line of its standard input. Steps follow each
other at a fixed period, and step k admits what has arrived by then, worked out from the trace alone, so that all ranks
admit the same. A request's latency counts from its arrival, not from when the engine got to it: no time is left out
because the engine was late.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Final

import msgspec

from kvcoord.client import BlockingCacheClient, BlockingLease, connect_blocking
from kvcoord.domain import PageKey
from kvcoord.load.dialogue import Lines
from kvcoord.load.pages import EnginePages
from kvcoord.load.trace import Request, read

ADMITTED_MAX: Final = 64
"""Requests of one step; more wait for the next one."""

TRIES_MAX: Final = 200
"""A request that finds no room is tried at every step, so often at most."""

TOLD_EVERY_S: Final = 1.0


class Stage(msgspec.Struct, frozen=True):
    """So many times as fast as the trace says, for so long."""

    speed_up: float
    seconds: float


class ArrivalsPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What one rank's engine plays: the trace over and over, in stages of different speed."""

    rank: int
    address: str
    trace: str
    stages: list[Stage]
    step_s: float
    call_timeout_s: float


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The engine is connected to its worker."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """All are connected: step 0 begins at this moment of the system's monotonic clock."""

    at_s: float


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    """What was served since the last word, and whether the engine has played to its end.

    `behind_s`: how late the last step began. `waiting`: requests that have arrived by that step and are not served.
    """

    latency_ms: list[float]
    step_us: list[float]
    behind_s: float
    steps_late: int
    skipped: int
    pages: int
    pages_hit: int
    pages_corrupt: int
    waiting: int
    done: bool


ToEngine = ArrivalsPlan | Begin
FromEngine = Opened | Told


class Waiting:
    """A request that has arrived."""

    __slots__ = ("arrived_s", "keys", "tries")

    def __init__(self, keys: list[PageKey], arrived_s: float) -> None:
        self.keys, self.arrived_s = keys, arrived_s
        self.tries = 0


def arrivals(requests: list[Request], stages: list[Stage]) -> Iterator[tuple[float, Request]]:
    """(seconds after the beginning, request), the trace over and over until the last stage is over.

    The next stage goes on in the trace where the last one stopped. A trace begins again a second after its end.
    """
    coming = _endless(requests)
    trace_s, request = next(coming)
    stage_trace_s = stage_begun_s = 0.0
    for stage in stages:
        while (after_s := (trace_s - stage_trace_s) / stage.speed_up) < stage.seconds:
            yield stage_begun_s + after_s, request
            trace_s, request = next(coming)
        stage_trace_s += stage.seconds * stage.speed_up
        stage_begun_s += stage.seconds


def _endless(requests: list[Request]) -> Iterator[tuple[float, Request]]:
    """(seconds of the trace, request), turn after turn."""
    first_ms = requests[0].timestamp_ms
    turn_s = (requests[-1].timestamp_ms - first_ms) / 1000 + 1
    for turn in count():
        for request in requests:
            yield turn * turn_s + (request.timestamp_ms - first_ms) / 1000, request


class OpenLoop:
    """Plays the steps of one engine."""

    def __init__(self, plan: ArrivalsPlan, cache: BlockingCacheClient, pages: EnginePages) -> None:
        self._plan = plan
        self._cache = cache
        self._pages = pages
        self._coming = arrivals(read(plan.trace), plan.stages)
        self._next = next(self._coming, None)
        self._waiting: deque[Waiting] = deque()
        self._held: list[BlockingLease] = []
        self._step = 0
        self._latency_ms: list[float] = []
        self._step_us: list[float] = []
        self._behind_s = 0.0
        self._steps_late = self._skipped = self._hit = self._total = self._corrupt = 0

    @property
    def over(self) -> bool:
        """Everything that arrives has been served, and nothing is held."""
        return self._next is None and not self._waiting and not self._held

    def step(self, start_s: float) -> None:
        """One step: waits for its time, admits, computes."""
        due_s = start_s + self._step * self._plan.step_s
        early_s = due_s - time.monotonic()
        self._behind_s = max(-early_s, 0.0)
        if early_s > 0:
            time.sleep(early_s)
        elif -early_s > self._plan.step_s:
            self._steps_late += 1
        self._arrive(start_s)
        admitted = [self._waiting.popleft() for _ in range(min(len(self._waiting), ADMITTED_MAX))]
        begun = time.perf_counter_ns()
        leases = self._ask(admitted)
        self._step_us.append((time.perf_counter_ns() - begun) / 1000)
        now_s = time.monotonic()
        again = [
            request for request, lease in zip(admitted, leases, strict=True) if not self._serve(request, lease, now_s)
        ]
        self._waiting.extendleft(reversed(again))
        self._step += 1

    def told(self) -> Told:
        """What has happened since the last time."""
        said = Told(
            latency_ms=self._latency_ms,
            step_us=self._step_us,
            behind_s=self._behind_s,
            steps_late=self._steps_late,
            skipped=self._skipped,
            pages=self._total,
            pages_hit=self._hit,
            pages_corrupt=self._corrupt,
            waiting=len(self._waiting),
            done=self.over,
        )
        self._latency_ms, self._step_us = [], []
        self._steps_late = self._skipped = self._hit = self._total = self._corrupt = 0
        return said

    def _arrive(self, start_s: float) -> None:
        """What has arrived by this step's time: the same on all ranks, however late any of them is."""
        until_s = self._step * self._plan.step_s
        while self._next is not None and self._next[0] <= until_s:
            at_s, request = self._next
            self._waiting.append(Waiting(request.keys, start_s + at_s))
            self._next = next(self._coming, None)

    def _ask(self, admitted: list[Waiting]) -> list[BlockingLease]:
        """One message: what the last step computed, this step, what is admitted."""
        cache = self._cache
        for lease in self._held:
            cache.write_lease_nowait(lease, deferred=True)
            cache.release_nowait(lease)
        self._held = []
        advance = cache.advance_nowait(self._step)
        tickets = [cache.acquire_nowait(request.keys) for request in admitted]
        advance.wait()
        return [ticket.wait() for ticket in tickets]

    def _serve(self, request: Waiting, lease: BlockingLease, now_s: float) -> bool:
        """Reads what was cached, computes the rest. False: no room, to be tried again."""
        if not lease:
            request.tries += 1
            self._skipped += request.tries == TRIES_MAX
            return request.tries >= TRIES_MAX
        cached = lease.device_pages + lease.host_pages
        slots = lease.slots[0]
        self._latency_ms.append((now_s - request.arrived_s) * 1000)
        self._total += len(request.keys)
        self._hit += cached
        self._corrupt += self._pages.count_corrupt(request.keys[:cached], slots[:cached])
        self._pages.fill(request.keys[cached:], slots[cached:])
        self._held.append(lease)
        return True


def main() -> int:
    """Plays until everything is served, telling every second what happened."""
    lines: Lines[ToEngine] = Lines(ToEngine, sys.stdin.buffer, sys.stdout.buffer)
    plan = lines.hear()
    assert isinstance(plan, ArrivalsPlan)
    with connect_blocking(plan.address, call_timeout_s=plan.call_timeout_s) as cache:
        cache.register()
        pages = EnginePages(cache.device[0], plan.rank)
        loop = OpenLoop(plan, cache, pages)
        gc.collect()
        gc.freeze()
        lines.say(Opened())
        begin = lines.hear()
        assert isinstance(begin, Begin)
        told_s = time.monotonic()
        while not loop.over:
            loop.step(begin.at_s)
            if time.monotonic() - told_s >= TOLD_EVERY_S:
                told_s = time.monotonic()
                lines.say(loop.told())
        lines.say(loop.told())
        lines.wait_for_end()
        pages.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
