"""The process of one engine in a replay: connects to its rank's worker, plays its plan, reports, waits for the end.

Run as `python -m kvcoord.load.driver`; its plan is the first line of its standard input. See `dialogue`.
"""

import gc
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvcoord.client import connect_blocking
from kvcoord.errors import KvcoordError
from kvcoord.load.dialogue import (
    EXPLAINED,
    DriverFailed,
    DriverPlan,
    DriverReport,
    FromReplay,
    Lines,
    Progress,
    Ready,
    Settled,
    Settling,
    Start,
)
from kvcoord.load.engine import Engine
from kvcoord.load.pace import Pace
from kvcoord.load.pages import EnginePages
from kvcoord.load.trace import read
from kvcoord.protocol.local import Failed

PROGRESS_INTERVAL_S: Final = 0.1


def main() -> int:
    """Returns the exit code: 0, or EXPLAINED when the plan could not be played to its end."""
    lines: Lines[DriverPlan | FromReplay] = Lines(DriverPlan | FromReplay, sys.stdin.buffer, sys.stdout.buffer)
    plan = lines.hear()
    assert isinstance(plan, DriverPlan)
    try:
        play(plan, lines)
    except KvcoordError as error:
        with suppress(BrokenPipeError):  # A replay that was killed hears no more.
            lines.say(failure(error))
        return EXPLAINED
    return 0


def play(plan: DriverPlan, lines: Lines[DriverPlan | FromReplay]) -> None:
    """Plays the trace and reports. The worker keeps this engine's cache until the replay has seen enough of it."""
    requests = read(plan.trace, plan.requests_max)
    pace = Pace(
        speed_up=plan.speed_up,
        jitter_s=plan.jitter_s,
        seed=plan.rank,
        upstream=_inherited(plan.upstream_fd),
        downstream=_inherited(plan.downstream_fd),
        sleep=lines.rest,
    )
    with connect_blocking(plan.address, call_timeout_s=plan.call_timeout_s) as cache:
        cache.register()
        pages = [EnginePages(memory, plan.bytes_of) for memory in cache.device]
        engine = Engine(plan, cache, pages, pace, _settled(plan, lines))
        gc.freeze()
        lines.say(Ready())
        start = lines.hear()
        assert isinstance(start, Start)
        pace.start(start.at_s)
        begun_s = told_s = time.monotonic()
        for number, request in enumerate(requests, start=1):
            engine.serve(request)
            if plan.progress and time.monotonic() - told_s > PROGRESS_INTERVAL_S:
                told_s = time.monotonic()
                lines.say(Progress(number))
        engine.settle()
        seconds = time.monotonic() - begun_s
        lines.say(
            DriverReport(
                rank=plan.rank,
                tally=engine.tally,
                seconds=seconds,
                step_ns=engine.step_ns,
                advance_ns=engine.advance_ns,
            )
        )
        lines.wait_for_end()
        for of_pool in pages:
            of_pool.close()
    pace.close()


def failure(error: KvcoordError) -> DriverFailed:
    """An error as it travels to the replay."""
    fields = [field if isinstance(field, str | int | float | list) else str(field) for field in error.args]
    return DriverFailed(Failed(type(error).__name__, fields))


def _settled(plan: DriverPlan, lines: Lines[DriverPlan | FromReplay]) -> Callable[[int], bool]:
    """Agreed ranks have the same operations open at the same step; others have to ask each other."""
    if not plan.alone:
        return lambda operations_open: operations_open == 0

    def ask(operations_open: int) -> bool:
        lines.say(Settling(operations_open))
        answer = lines.hear()
        assert isinstance(answer, Settled)
        return answer.everywhere

    return ask


def _inherited(descriptor: int) -> socket.socket | None:
    return None if descriptor < 0 else socket.socket(fileno=descriptor)


if __name__ == "__main__":
    sys.exit(main())
