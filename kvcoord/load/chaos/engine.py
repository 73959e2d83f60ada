"""The process of one engine under chaos: plays its trace on and on, and begins a new life whenever its group does.

Run as `python -m kvcoord.load.chaos.engine`; its plan is the first line of its standard input. A life begins with a
vote on where in the trace to go on, so that engines that were started again and those that were not play the same.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec

from kvcoord.client import BlockingCacheClient, connect_blocking
from kvcoord.domain import Agreement, Committed
from kvcoord.errors import GroupRenewed, KvcoordError
from kvcoord.load.dialogue import DriverPlan, Lines, Tally
from kvcoord.load.engine import Engine
from kvcoord.load.pace import Pace
from kvcoord.load.pages import EnginePages
from kvcoord.load.trace import Request, read

PROGRESS_INTERVAL_S: Final = 0.05
RECONNECT_INTERVAL_S: Final = 0.05
CONNECT_TIMEOUT_S: Final = 1.0

MODEL: Final = "trace"
"""Pages of one life of an engine are good in the next: what they hold follows from their keys."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Play up to this request, let every operation end, and report."""

    at: int


class Played(msgspec.Struct, frozen=True, tag="played"):
    """Requests of the trace that are done, counted over all its repetitions."""

    requests: int


class LifeEnded(msgspec.Struct, frozen=True, tag="life_ended"):
    """Why this life of the engine is over."""

    error: str
    text: str


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True, tag="chaos_report"):
    """One engine at the end. `step_max_s`: the longest that its thread was blocked in one step."""

    lives: int
    requests: int
    pages_hit: int
    pages_verified: int
    pages_corrupt: int
    step_max_s: float
    late: bool


FromChaos = DriverPlan | Finish
FromEngine = Played | LifeEnded | ChaosReport


class Player:
    """Plays lives until it is told to finish."""

    def __init__(self, plan: DriverPlan, requests: Sequence[Request], lines: Lines[FromChaos]) -> None:
        self.finish_at: int | None = None
        self._plan = plan
        self._requests = requests
        self._lines = lines
        self._next = 0
        self._told_at = 0.0
        self._lives = 0
        self._sums = dict.fromkeys(("requests", "pages_hit", "pages_verified", "pages_corrupt"), 0)
        self._step_max_ns = 0

    def play(self) -> None:
        """Connects and plays, again and again, until a life has come to its planned end."""
        while True:
            try:
                with connect_blocking(
                    self._plan.address,
                    call_timeout_s=self._plan.call_timeout_s,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                ) as cache:
                    self._play_connected(cache)
                    return
            except KvcoordError as error:
                self._lines.say(LifeEnded(type(error).__name__, str(error)))
                time.sleep(RECONNECT_INTERVAL_S)

    def _play_connected(self, cache: BlockingCacheClient) -> None:
        """Lives over one connection."""
        while True:
            cache.register(model=MODEL)
            pages = EnginePages(cache.device[0], self._plan.bytes_of)
            try:
                self._live(cache, pages)
                return
            except GroupRenewed as error:
                self._lines.say(LifeEnded("GroupRenewed", str(error)))
            finally:
                pages.close()

    def _live(self, cache: BlockingCacheClient, pages: EnginePages) -> None:
        plan = self._plan
        self._lives += 1
        self._next = self._agree_where(cache)
        pace = Pace(
            speed_up=0.0, jitter_s=plan.jitter_s, seed=plan.rank, upstream=None, downstream=None, sleep=time.sleep
        )
        engine = Engine(plan, cache, [pages], pace, lambda operations_open: operations_open == 0)
        try:
            while self.finish_at is None or self._next < self.finish_at:
                engine.serve(self._requests[self._next % len(self._requests)])
                self._next += 1
                self._account(engine)
                self._tell()
            late = self._next > self.finish_at
            engine.settle()
        finally:
            self._add(engine.tally)
        self._lines.say(ChaosReport(lives=self._lives, step_max_s=self._step_max_ns / 1e9, late=late, **self._sums))
        threading.Event().wait()

    def _agree_where(self, cache: BlockingCacheClient) -> int:
        """The furthest that any engine of the group has come. A vote that aborts is put again, on all ranks alike."""
        for attempt in count():
            outcome = cache.agree(f"resume/{attempt}", True, agreement=Agreement.MAX, value=self._next)
            if isinstance(outcome, Committed):
                assert isinstance(outcome.value, int)
                return outcome.value
        raise AssertionError("unreachable")

    def _account(self, engine: Engine) -> None:
        """Takes the times of the last steps, so that they do not pile up."""
        self._step_max_ns = max(self._step_max_ns, *engine.step_ns)
        engine.step_ns.clear()
        engine.advance_ns.clear()

    def _add(self, tally: Tally) -> None:
        self._sums["requests"] += tally.requests
        self._sums["pages_hit"] += tally.pages_hit_device + tally.pages_hit_host
        self._sums["pages_verified"] += tally.pages_verified
        self._sums["pages_corrupt"] += tally.pages_corrupt

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at > PROGRESS_INTERVAL_S:
            self._told_at = now
            self._lines.say(Played(self._next))


def main() -> int:
    """Returns the exit code."""
    lines: Lines[FromChaos] = Lines(FromChaos, sys.stdin.buffer, sys.stdout.buffer)
    plan = lines.hear()
    assert isinstance(plan, DriverPlan)
    player = Player(plan, read(plan.trace, plan.requests_max), lines)
    threading.Thread(target=_listen, args=(lines, player), daemon=True).start()
    player.play()
    return 0


def _listen(lines: Lines[FromChaos], player: Player) -> None:
    """Waits for the word to finish on a thread of its own, and ends the process when its input ends."""
    while True:
        try:
            said = lines.hear()
        except KvcoordError:
            os._exit(0)
        if isinstance(said, Finish):
            player.finish_at = said.at


if __name__ == "__main__":
    sys.exit(main())
