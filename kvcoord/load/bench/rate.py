"""Finds out how many requests a second a group keeps up with: plays faster and faster until it falls behind.

A group keeps up while its steps begin on time, or are on time again soon after a stall. What a machine does for others
meanwhile lowers the rate that is found; pools that are not full yet raise it, since nothing is evicted. So a long run
takes a share of it.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvcoord.load.bench.arrivals import Stage, arrivals
from kvcoord.load.bench.players import Heard, players
from kvcoord.load.plan import ReplayPlan
from kvcoord.load.trace import Request, read

FIRST_RATE: Final = 5.0
"""Requests a second of the first stage."""

FACTOR: Final = 1.5
STAGES_MAX: Final = 16
STAGE_S: Final = 4.0

BEHIND_MAX_S: Final = 0.25
"""A step that begins later than this, and those around it too, belongs to a group that does not keep up."""

SHARE: Final = 0.5
"""Of the rate that was kept up for a few seconds, what is offered for minutes."""


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the search, rates as requests a second. `behind_ms`: how late steps began at its end."""

    case: str
    speed_up: float
    offered_per_s: float
    served_per_s: float
    behind_ms: float
    kept_up: bool


class Found(msgspec.Struct, frozen=True):
    """The speed-up for a long run, and the stages that were played to find it."""

    speed_up: float
    rows: list[RateRow]


class _FellBehind(Exception):
    """Ends the search; everything that was started ends with it."""


async def find_rate(
    plan: ReplayPlan,
    step_s: float,
    on_case: Callable[[str], None],
    *,
    stage_s: float = STAGE_S,
    stages_max: int = STAGES_MAX,
) -> Found:
    """Plays with processes of its own, for at most `stages_max` stages of `stage_s` seconds."""
    requests = read(plan.options.trace)
    stages = _stages(requests, stage_s, stages_max)
    arriving_s = [at_s for at_s, _ in arrivals(requests, stages)]
    heard: list[list[Heard]] = [[] for _ in range(plan.group.world_size)]
    rows: list[RateRow] = []

    def note(rank: int, word: Heard) -> None:
        heard[rank].append(word)
        heard_s = min(words[-1].at_s if words else 0.0 for words in heard)
        while (number := len(rows)) < min(len(stages), int(heard_s / stage_s)):
            rows.append(stage_row(number, stages[number], arriving_s, heard))
            on_case(f"looking for the rate: {rows[-1].offered_per_s:.0f} requests/s, kept up: {rows[-1].kept_up}")
            if not rows[-1].kept_up:
                raise _FellBehind

    try:
        async with players(plan, stages, step_s) as playing:
            await playing.listen(playing.begin(), note)
    except* _FellBehind:
        pass
    kept = [row.speed_up for row in rows if row.kept_up]
    return Found(SHARE * max(kept, default=stages[0].speed_up), rows)


def stage_row(number: int, stage: Stage, arriving_s: Sequence[float], heard: Sequence[Sequence[Heard]]) -> RateRow:
    """What one stage has shown. Of each engine counts the most punctual step it told of in the stage's second half."""
    begin_s, end_s = number * stage.seconds, (number + 1) * stage.seconds
    of_rank_0 = [word.said for word in heard[0] if begin_s < word.at_s <= end_s]
    behind_s = least_behind_s(heard, begin_s + stage.seconds / 2, end_s)
    offered = sum(1 for at_s in arriving_s if begin_s <= at_s < end_s)
    served = sum(len(said.latency_ms) for said in of_rank_0)
    return RateRow(
        case=f"seconds {begin_s:g} to {end_s:g}",
        speed_up=stage.speed_up,
        offered_per_s=offered / stage.seconds,
        served_per_s=served / stage.seconds,
        behind_ms=behind_s * 1000,
        kept_up=behind_s <= BEHIND_MAX_S,
    )


def least_behind_s(heard: Sequence[Sequence[Heard]], after_s: float, until_s: float) -> float:
    """The worst engine's most punctual step in this time: a stall that was made good again is none."""
    told = [[word.said.behind_s for word in words if after_s < word.at_s <= until_s] for words in heard]
    return max((min(late) if late else until_s - after_s for late in told), default=0.0)


def _stages(requests: list[Request], stage_s: float, count: int) -> list[Stage]:
    trace_s = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000 + 1
    first = FIRST_RATE * trace_s / len(requests)
    return [Stage(first * FACTOR**number, stage_s) for number in range(count)]
