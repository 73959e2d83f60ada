"""`kvcoord bench agreement`: decisions, lockstep steps and covered operations against a blocking all_reduce.

Every case alternates short blocks of its subjects on the same ranks, so a busy moment of the machine hits all of them.
Times of all ranks count: a rank that is late itself pays nothing in a collective, those that wait for it do.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvcoord.load.bench.bed import Bed, open_bed
from kvcoord.load.bench.dialogue import Act, Block, Subject
from kvcoord.load.bench.result import (
    Budget,
    Chart,
    LatencyRow,
    Line,
    Result,
    Series,
    compare,
    distribution,
    over_time,
)

STEP_S: Final = 0.005
SPREAD_S: Final = 0.001
LATE_S: Final = 0.005
LAGS: Final = (1, 2, 4)
VOTES: Final = (0, 1, 16, 64)
COVERED_BATCH: Final = 16

NAMES: Final = {
    Subject.MEMBER: "kvcoord, member in the engine",
    Subject.SIDECAR: "kvcoord, through the sidecar",
    Subject.SIDECAR_LATER: "kvcoord, sidecar read a step later",
    Subject.GLOO: "gloo all_reduce(MIN)",
    Subject.STAR: "raw Unix star",
    Subject.LEDGER: "kvcoord, ledger",
}

OnCase = Callable[[str], None]
"""Called with what is measured next."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How long a benchmark measures: blocks of each subject in a case, and acts in a block."""

    blocks: int = 3
    acts: int = 100


QUICK: Final = Effort(blocks=1, acts=20)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """`ours` are compared with each of `peers`. `budgets` by subject and peer."""

    name: str
    block: Block
    ours: tuple[Subject, ...]
    peers: tuple[Subject, ...]
    budgets: dict[tuple[Subject, Subject], Budget] = {}


async def agreement(
    ranks: list[int], effort: Effort, *, sidecar: bool = True, on_case: OnCase = lambda _: None
) -> Result:
    """Measures every case with each number of ranks."""
    rows: list[LatencyRow] = []
    charts: list[Chart] = []
    medians: dict[str, list[tuple[float, float]]] = {}
    gloo = False
    for count in ranks:
        async with open_bed(count, list(LAGS), sidecar=sidecar) as bed:
            gloo = bed.gloo
            for case in cases(count, sidecar=sidecar):
                on_case(f"{case.name}, {count} ranks")
                series = await run_case(bed, case, effort)
                rows += case_rows(case, count, series)
                charts += case_charts(case, count, series)
                if case.block.act is Act.IMMEDIATE:
                    for subject, measured in series.items():
                        rate = 1e6 / measured.quantile(0.5)
                        medians.setdefault(NAMES[subject], []).append((float(count), rate))
    charts.insert(0, _throughput(medians))
    return Result(
        name="agreement",
        title="Agreement of lockstep ranks",
        rows=rows,
        charts=charts,
        notes=_notes(gloo=gloo),
    )


def cases(ranks: int, *, sidecar: bool) -> list[Case]:
    """All cases for so many ranks."""
    side = (Subject.SIDECAR,) if sidecar else ()
    stepping = (Subject.MEMBER, Subject.SIDECAR_LATER, *side) if sidecar else (Subject.MEMBER,)
    made = [
        Case(
            name="immediate decision",
            block=_block(Act.IMMEDIATE),
            ours=(Subject.MEMBER, *side),
            peers=(Subject.GLOO, Subject.STAR),
            budgets=_immediate_budgets(ranks),
        ),
        Case(
            name="immediate decision, one rank up to 5 ms late",
            block=_block(Act.IMMEDIATE, period_s=STEP_S * 2, late_s=LATE_S),
            ours=(Subject.MEMBER,),
            peers=(Subject.GLOO,),
        ),
    ]
    for votes in VOTES:
        made.append(
            Case(
                name=f"step, {votes} votes" if votes else "step, idle",
                block=_block(Act.STEP, votes=votes, period_s=STEP_S, spread_s=SPREAD_S),
                ours=stepping if votes in (0, 16) else (Subject.MEMBER,),
                peers=(Subject.GLOO,),
                budgets={} if votes else _step_budgets(ranks),
            )
        )
    for votes in (0, 16):
        made.append(
            Case(
                name=f"step, {votes} votes, one rank up to 5 ms late" if votes else "step, idle, one rank late",
                block=_block(Act.STEP, votes=votes, period_s=STEP_S * 2, late_s=LATE_S),
                ours=(Subject.MEMBER,),
                peers=(Subject.GLOO,),
            )
        )
    made += [
        Case(
            name=f"step, idle, pipeline depth {lag}",
            block=_block(Act.STEP, lag=lag, period_s=STEP_S, spread_s=SPREAD_S),
            ours=(Subject.MEMBER,),
            peers=(Subject.GLOO,),
        )
        for lag in LAGS[1:]
    ]
    made.append(
        Case(
            name="covered operation",
            block=_block(Act.COVERED, votes=COVERED_BATCH),
            ours=(Subject.LEDGER, *side),
            peers=(Subject.GLOO,),
            budgets={(Subject.LEDGER, Subject.GLOO): Budget(p50_us_max=10.0)},
        )
    )
    return made


async def run_case(bed: Bed, case: Case, effort: Effort) -> dict[Subject, Series]:
    """The times of each subject that is there. The first block of each subject only warms it."""
    there = [subject for subject in (*case.ours, *case.peers) if bed.gloo or subject is not Subject.GLOO]
    micros: dict[Subject, list[float]] = {subject: [] for subject in there}
    for number in range(effort.blocks + 1):
        for subject in there:
            count = effort.acts if number else min(effort.acts, 20)
            measured = await bed.measure(_of_subject(case.block, subject, count))
            if number:
                micros[subject] += _interleaved(measured, _acts_in_one(case.block, subject))
    return {subject: Series(NAMES[subject], times) for subject, times in micros.items()}


def case_rows(case: Case, ranks: int, series: dict[Subject, Series]) -> list[LatencyRow]:
    rows = []
    for ours in case.ours:
        name = f"{case.name} ({NAMES[ours].removeprefix('kvcoord, ')})"
        rows += [
            compare(name, ranks, series[ours], series[peer], case.budgets.get((ours, peer)))
            for peer in case.peers
            if peer in series
        ]
    return rows


def case_charts(case: Case, ranks: int, series: dict[Subject, Series]) -> list[Chart]:
    """How the times are distributed; and, where ranks wait for a late one, when."""
    charts = [
        Chart(
            title=f"{case.name}, {ranks} ranks: how long the engine's thread is held up",
            x_label="microseconds",
            y_label="share of all",
            lines=[distribution(measured) for measured in series.values()],
            x_log=True,
        )
    ]
    if case.block.late_s and case.block.act is Act.STEP:
        charts.append(
            Chart(
                title=f"{case.name}, {ranks} ranks: stall of each step",
                x_label="step (all ranks)",
                y_label="microseconds",
                lines=[over_time(measured) for measured in series.values()],
                y_log=True,
            )
        )
    return charts


def _throughput(medians: dict[str, list[tuple[float, float]]]) -> Chart:
    return Chart(
        title="Immediate decisions a second, one after another",
        x_label="ranks",
        y_label="decisions a second (1 / median)",
        lines=[Line(subject, points) for subject, points in medians.items()],
        x_log=True,
        y_log=True,
    )


def _block(act: Act, **fields: float) -> Block:
    return msgspec.convert({"number": 0, "subject": Subject.MEMBER, "act": act, "count": 0, **fields}, Block)


def _of_subject(block: Block, subject: Subject, count: int) -> Block:
    """The block as this subject performs it: a peer of covered operations has nothing like them but a decision."""
    changed = {"subject": subject, "count": count}
    if block.act is Act.COVERED and subject is Subject.GLOO:
        return msgspec.structs.replace(block, act=Act.IMMEDIATE, votes=0, **changed)
    return msgspec.structs.replace(block, **changed)


def _acts_in_one(block: Block, subject: Subject) -> int:
    return block.votes if block.act is Act.COVERED and subject is not Subject.GLOO else 1


def _interleaved(by_rank: list[list[float]], acts_in_one: int) -> list[float]:
    """All ranks' times, act by act."""
    return [micros / acts_in_one for at_once in zip(*by_rank, strict=True) for micros in at_once]


def _immediate_budgets(ranks: int) -> dict[tuple[Subject, Subject], Budget]:
    ratio = {2: 2 / 3, 4: 1 / 3, 8: 1 / 6}.get(ranks)
    of_gloo = {} if ratio is None else {(Subject.MEMBER, Subject.GLOO): Budget(ratio_p50_max=ratio, ratio_p99_max=0.1)}
    return {**of_gloo, (Subject.MEMBER, Subject.STAR): Budget(ratio_p50_max=3.0)}


def _step_budgets(ranks: int) -> dict[tuple[Subject, Subject], Budget]:
    ratio = {4: 1 / 20, 8: 1 / 40}.get(ranks)
    if ratio is None:
        return {}
    return {(Subject.MEMBER, Subject.GLOO): Budget(ratio_p50_max=ratio, ratio_p99_max=0.1)}


def _notes(*, gloo: bool) -> list[str]:
    notes = [
        "Steps are 5 ms apart and ranks arrive up to 1 ms apart, unless a case says otherwise.",
        "A covered operation sends nothing in a member; through the sidecar, the time is that of one of"
        f" {COVERED_BATCH} allocations in one message, given back in the next.",
        "The raw Unix star is the physical limit: the same processes exchange one number over sockets, with no"
        " protocol, no deadline and no way to notice a lost rank.",
    ]
    if not gloo:
        notes.append("torch is not installed here, so there is no all_reduce to compare with.")
    return notes
