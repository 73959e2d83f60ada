"""`kvcoord bench trace`: the same trace with kvcoord and with a blocking collective, in turn, through real processes.

What is compared is the whole of a run, bytes moved and verified included, and the time of the engine's thread in one
step with a request. Both sides run the same cache logic and make the same hits; only how ranks agree differs.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from kvcoord.errors import InvariantBroken
from kvcoord.load.bench.result import Result
from kvcoord.load.plan import Agreeing, ReplayOptions, plan_replay
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport

PART_REQUESTS: Final = 1000
PART_TURNS: Final = 3
QUICK_REQUESTS: Final = 100


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which trace, on how many ranks. `requests_max` None: a part of it in some turns, then the whole of it once."""

    trace: str
    ranks: int
    requests_max: int | None = None
    unlimited: bool = False


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of the trace: medians over the turns. Ratios are kvcoord's time over gloo's; None without torch."""

    case: str
    ranks: int
    requests: int
    pages_hit: int
    turns: int
    seconds: float
    gloo_seconds: float | None
    ratio_seconds: float | None
    step_p50_us: float
    step_p99_us: float
    gloo_step_p50_us: float | None
    gloo_step_p99_us: float | None
    ratio_step_p50: float | None


async def replays(options: TraceOptions, *, quick: bool, on_case: Callable[[str], None] = lambda _: None) -> Result:
    """Plays every stretch. Raises InvariantBroken when a run ended with a wrong page, a leak or unequal ranks."""
    requests_max = options.requests_max or (QUICK_REQUESTS if quick else None)
    stretches = [(requests_max, 1 if quick else PART_TURNS)]
    if requests_max is None:
        stretches = [(PART_REQUESTS, PART_TURNS), (None, 1)]
    agreements = [Agreeing.KVCOORD, *([Agreeing.GLOO] if find_spec("torch") else [])]
    rows = []
    for requests, turns in stretches:
        reports: dict[Agreeing, list[ReplayReport]] = {agreement: [] for agreement in agreements}
        for turn in range(turns):
            for agreement in agreements:
                on_case(f"{requests or 'all'} requests with {agreement}, turn {turn + 1} of {turns}")
                reports[agreement].append(await _play(options, agreement, requests))
        rows.append(trace_row(reports[Agreeing.KVCOORD], reports.get(Agreeing.GLOO, [])))
    pools = "that never fill" if options.unlimited else "that are smaller than the trace, so that pages are evicted"
    notes = [
        f"Host and device pools {pools}. Requests follow each other without a pause; every page read is verified.",
        "A step is engine-thread time of one message to the worker and one back: publish, advance, acquire.",
    ]
    if len(agreements) == 1:
        notes.append("torch is not installed here, so there is no gloo to compare with.")
    return Result(name="trace", title=f"A request trace on {options.ranks} ranks", rows=rows, notes=notes)


async def _play(options: TraceOptions, agreement: Agreeing, requests: int | None) -> ReplayReport:
    report = await replay(
        plan_replay(
            ReplayOptions(
                trace=options.trace,
                ranks=options.ranks,
                requests_max=requests,
                unlimited=options.unlimited,
                agreement=agreement,
            )
        )
    )
    if report.exit_code:
        found = f"{report.pages_corrupt} corrupt, {report.pages_leaked} leaked, ranks equal: {report.digests_equal}"
        raise InvariantBroken("a replay verifies every page", f"with {agreement}: {found}")
    return report


def trace_row(ours: list[ReplayReport], peers: list[ReplayReport]) -> TraceRow:
    """One row of the runs of one stretch, of which ours is at least one."""
    first = ours[0]
    seconds, step_p50_us, step_p99_us = _medians(ours)
    gloo_seconds, gloo_step_p50_us, gloo_step_p99_us = _medians(peers) if peers else (None, None, None)
    return TraceRow(
        case=Path(first.trace).name,
        ranks=first.ranks,
        requests=first.requests,
        pages_hit=first.pages_hit,
        turns=len(ours),
        seconds=seconds,
        gloo_seconds=gloo_seconds,
        ratio_seconds=None if gloo_seconds is None else seconds / gloo_seconds,
        step_p50_us=step_p50_us,
        step_p99_us=step_p99_us,
        gloo_step_p50_us=gloo_step_p50_us,
        gloo_step_p99_us=gloo_step_p99_us,
        ratio_step_p50=None if gloo_step_p50_us is None else step_p50_us / gloo_step_p50_us,
    )


def _medians(reports: list[ReplayReport]) -> tuple[float, float, float]:
    """Seconds, and the step's two quantiles in microseconds."""
    return (
        median(report.seconds for report in reports),
        median(report.step_us_p50 for report in reports),
        median(report.step_us_p99 for report in reports),
    )
