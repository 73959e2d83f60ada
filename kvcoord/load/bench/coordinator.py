"""`kvcoord bench coordinator`: what one coordinator core can tally, what it holds, and what it costs when idle.

Without sockets (`tally`) for many ranks and groups; as a process, over a node link and over ZeroMQ, for some ranks (see
`served`).
"""

from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec

from kvcoord.load.bench.result import Chart, Line, Result
from kvcoord.load.bench.served import SCHEMES, Served, serve
from kvcoord.load.bench.tally import TallyPlan, TallyReport
from kvcoord.load.dialogue import line
from kvcoord.runtime.children import Child, Children

VOTES_PER_S_MIN: Final = 500_000
RESIDENT_BYTES_MAX: Final = 60_000_000
READY_S_MAX: Final = 0.5

MACHINE: Final = "machine"
MACHINE_CROWDED: Final = "machine, copies open"
RANKS: Final = (1, 4, 16, 64)
VOTES: Final = (1, 16, 64)
GROUPS: Final = (1, 10, 100, 1000)
SCALE_RANKS: Final = (2, 8, 32, 128, 512, 1024)

COPIES_OPEN: Final = 2000
"""Half of what the limits allow by default."""

ROUND_VOTES: Final = 20_000
"""A case plays as many rounds as hold about so many votes, within limits."""


class CoordinatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `round_us` is one round of one group on the coordinator's core, None what a case does not show."""

    case: str
    ranks: int
    groups: int
    votes: int
    round_us: float | None = None
    votes_per_s: float | None = None
    resident_mb: float | None = None
    group_kb: float | None = None
    cpu_share: float | None = None
    ready_s: float | None = None
    budget: str = ""
    met: bool | None = None


async def coordinator(*, quick: bool, on_case: Callable[[str], None] = lambda _: None) -> Result:
    """Measures every case."""
    rows: list[CoordinatorRow] = []
    async with Children(keep_errors=True) as children:
        for ranks in RANKS[1:2] if quick else RANKS:
            for votes in VOTES:
                on_case(f"{ranks} ranks, {votes} votes")
                rows.append(await _tallied(children, TallyPlan(ranks=ranks, groups=1, votes=votes, rounds=0)))
        for groups in GROUPS[:2] if quick else GROUPS:
            on_case(f"{groups} groups")
            rows.append(await _tallied(children, TallyPlan(ranks=4, groups=groups, votes=1, rounds=0)))
        on_case(f"{COPIES_OPEN} copies open")
        crowded = TallyPlan(ranks=4, groups=1, votes=1, rounds=0, copies_open=COPIES_OPEN)
        rows.append(await _tallied(children, crowded))
    for ranks in (4,) if quick else (4, 16):
        for scheme in SCHEMES:
            on_case(f"coordinator process at {scheme}, {ranks} ranks")
            rows += served_rows(await serve(scheme, ranks, votes=64, rounds=100 if quick else 1000))
    return Result(
        name="coordinator",
        title="One coordinator core",
        rows=rows,
        charts=[_votes_chart(rows), _groups_chart(rows)],
        notes=[
            "Cases of the machine decode every frame, decide and encode every verdict, without sockets.",
            "Votes a second of the process are those of one second of its processor time. At unix:// it has its sockets"
            " to itself; at ipc:// they are ZeroMQ's, whose I/O thread is counted too.",
        ],
    )


def served_rows(served: Served) -> list[CoordinatorRow]:
    """What the process showed: tallying, memory and start, and idle."""
    limits = f"< {RESIDENT_BYTES_MAX / 1e6:.0f} MB resident, ready in < {READY_S_MAX} s"
    return [
        CoordinatorRow(
            case=f"process, {served.scheme}",
            ranks=served.ranks,
            groups=1,
            votes=served.votes,
            round_us=served.round_cpu_s * 1e6,
            votes_per_s=served.ranks * served.votes / served.round_cpu_s,
            resident_mb=served.resident_bytes / 1e6,
            ready_s=served.ready_s,
            budget=limits,
            met=served.resident_bytes < RESIDENT_BYTES_MAX and served.ready_s < READY_S_MAX,
        ),
        CoordinatorRow(
            case=f"process, {served.scheme} idle",
            ranks=served.ranks,
            groups=1,
            votes=0,
            cpu_share=served.idle_cpu_share,
        ),
    ]


async def run_tally(child: Child, plan: TallyPlan) -> TallyReport:
    """Has a tally process play one plan."""
    child.say(line(plan))
    return msgspec.json.decode(await child.hear(), type=TallyReport)


async def start_tally(children: Children) -> Child:
    return await children.start("tally", ["-m", "kvcoord.load.bench.tally"], talks=True)


def rounds_of(plan: TallyPlan) -> int:
    """So many rounds that a case takes about a tenth of a second."""
    votes = plan.ranks * plan.groups * max(plan.votes, 1)
    return min(max(ROUND_VOTES // votes, 5), 500)


async def _tallied(children: Children, plan: TallyPlan) -> CoordinatorRow:
    child = await start_tally(children)
    report = await run_tally(child, msgspec.structs.replace(plan, rounds=rounds_of(plan)))
    await child.finish()
    round_us = median(report.rounds_us)
    votes_per_s = plan.ranks * plan.votes / round_us * 1e6
    counts = plan.votes == VOTES[-1]
    return CoordinatorRow(
        case=MACHINE_CROWDED if plan.copies_open else MACHINE,
        ranks=plan.ranks,
        groups=plan.groups,
        votes=plan.votes,
        round_us=round_us,
        votes_per_s=votes_per_s,
        resident_mb=report.resident_bytes / 1e6,
        group_kb=report.group_bytes / 1e3 if plan.groups >= 100 else None,
        budget=f">= {VOTES_PER_S_MIN:,} votes/s" if counts else "",
        met=votes_per_s >= VOTES_PER_S_MIN if counts else None,
    )


def _votes_chart(rows: list[CoordinatorRow]) -> Chart:
    lines: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.case == MACHINE and row.groups == 1 and row.votes_per_s:
            lines.setdefault(row.votes, []).append((float(row.ranks), row.votes_per_s))
    return Chart(
        title="Votes tallied by one core",
        x_label="ranks",
        y_label="votes a second",
        lines=[Line(f"{votes} votes a frame", points) for votes, points in lines.items()],
        x_log=True,
        y_log=True,
    )


def _groups_chart(rows: list[CoordinatorRow]) -> Chart:
    points = [
        (float(row.groups), row.round_us)
        for row in rows
        if row.case == MACHINE and row.ranks == 4 and row.votes == 1 and row.round_us is not None
    ]
    return Chart(
        title="One round of one group of 4 ranks, as groups grow",
        x_label="groups",
        y_label="microseconds",
        lines=[Line("1 vote a frame", sorted(points))],
        x_log=True,
    )
