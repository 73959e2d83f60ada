"""`kvcoord bench budgets`: every promise of the design, beside what was measured just now.

A budget that several rows of a benchmark share is met when all of them meet it; the worst row is shown.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec

from kvcoord.load.bench.agreement import QUICK, Effort, agreement
from kvcoord.load.bench.cells import cell
from kvcoord.load.bench.coordinator import (
    COPIES_OPEN,
    MACHINE,
    MACHINE_CROWDED,
    RESIDENT_BYTES_MAX,
    CoordinatorRow,
    coordinator,
)
from kvcoord.load.bench.copies import CopyRow, copies
from kvcoord.load.bench.index import IndexRow, PeerPlace, index
from kvcoord.load.bench.local import local
from kvcoord.load.bench.recovery import RecoveryRow, recovery
from kvcoord.load.bench.result import LatencyRow, Result

GROWTH_MAX: Final = 3.0
"""Flat: a hundred times as many pages may cost this much more, for the processor's caches are what they are."""

RANKS_COMPARED: Final = (4, 64)
LINEAR_MAX: Final = 1.5
"""Linear: one rank of many may cost this much more than one of few."""


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One promise. `measured` and `peer` as texts with their units; `met` None: not measured here, and why."""

    what: str
    budget: str
    measured: str
    peer: str
    ratio: float | None
    met: bool | None


async def budgets(
    ranks: list[int],
    effort: Effort,
    *,
    sglang: PeerPlace | None = None,
    on_case: Callable[[str], None] = lambda _: None,
) -> tuple[Result, list[Result]]:
    """Runs every benchmark, and returns the budgets and the benchmarks themselves."""
    quick = effort is QUICK
    results = [
        await agreement(ranks, effort, on_case=on_case),
        await local(effort),
        await index(quick=quick, peer=sglang, on_case=on_case),
        await coordinator(quick=quick, on_case=on_case),
        await copies(quick=quick, on_case=on_case),
        await recovery(min(ranks), runs=2 if quick else 5, on_case=on_case),
    ]
    rows = judge({result.name: result.rows for result in results})
    title = "Budgets: what was promised, and what was measured in this run"
    notes = ["CUDA copies are measured where a GPU is: by the tests marked for one."]
    return Result(name="budgets", title=title, rows=rows, notes=notes), results


def judge(rows: dict[str, Sequence[msgspec.Struct]]) -> list[BudgetRow]:
    """One row for each promise, from the rows of the benchmarks."""
    latencies = cast(Sequence[LatencyRow], [*rows["agreement"], *rows["local"]])
    return [
        *[_latency(row) for row in latencies if row.budget],
        *_index(cast(Sequence[IndexRow], rows["index"])),
        *_coordinator(cast(Sequence[CoordinatorRow], rows["coordinator"])),
        _copies(cast(Sequence[CopyRow], rows["copy"])),
        BudgetRow(
            what="CUDA copies", budget=">= 0.9 of a pinned copy", measured="no GPU here", peer="", ratio=None, met=None
        ),
        *[_recovery(row) for row in cast(Sequence[RecoveryRow], rows["recovery"])],
    ]


def _latency(row: LatencyRow) -> BudgetRow:
    return BudgetRow(
        what=f"{row.case}, {row.ranks} ranks",
        budget=row.budget,
        measured=f"p50 {cell(row.p50_us)}, p99 {cell(row.p99_us)} us",
        peer=f"{row.peer}: p50 {cell(row.peer_p50_us)}, p99 {cell(row.peer_p99_us)} us",
        ratio=row.ratio_p50,
        met=row.met,
    )


def _index(rows: Sequence[IndexRow]) -> list[BudgetRow]:
    judged = []
    for case in ("match", "insert"):
        of_case = [row for row in rows if row.case == case]
        against = [row for row in of_case if row.budget] or of_case
        worst = max(against, key=lambda row: row.p50_us)
        judged.append(
            BudgetRow(
                what=f"index: {case} a path of 188 pages, {worst.pages:,} cached",
                budget="p50 <= SGLang's Rust core",
                measured=f"p50 {worst.p50_us:.3g} us",
                peer="" if worst.peer_p50_us is None else f"{worst.peer}: {worst.peer_p50_us:.3g} us",
                ratio=worst.ratio_p50,
                met=worst.met,
            )
        )
        growth = of_case[-1].p50_us / of_case[0].p50_us
        judged.append(
            BudgetRow(
                what=f"index: {case}, {of_case[-1].pages:,} cached pages against {of_case[0].pages:,}",
                budget=f"flat: <= {GROWTH_MAX:g} times",
                measured=f"p50 {of_case[-1].p50_us:.3g} us",
                peer=f"p50 {of_case[0].p50_us:.3g} us",
                ratio=growth,
                met=growth <= GROWTH_MAX,
            )
        )
    return judged


def _coordinator(rows: Sequence[CoordinatorRow]) -> list[BudgetRow]:
    judged = []
    tallied = [row for row in rows if row.budget and row.case == MACHINE]
    worst = min(tallied, key=lambda row: row.votes_per_s or 0.0)
    judged.append(
        BudgetRow(
            what=f"votes tallied by one core, {worst.votes} a frame, {worst.ranks} ranks",
            budget=worst.budget,
            measured=f"{worst.votes_per_s or 0:,.0f} votes/s",
            peer="",
            ratio=None,
            met=worst.met,
        )
    )
    for row in rows:
        if row.ready_s is not None:
            judged.append(
                BudgetRow(
                    what=f"coordinator {row.case}, {row.ranks} ranks",
                    budget=row.budget,
                    measured=f"{row.resident_mb or 0:.0f} MB, ready in {row.ready_s or 0:.2f} s",
                    peer="",
                    ratio=(row.resident_mb or 0) * 1e6 / RESIDENT_BYTES_MAX,
                    met=row.met,
                )
            )
    judged += _growth(rows)
    torch = _imports_torch()
    judged.append(
        BudgetRow(
            what="coordinator imports torch",
            budget="never",
            measured="yes" if torch else "no",
            peer="",
            ratio=None,
            met=not torch,
        )
    )
    return judged


def _growth(rows: Sequence[CoordinatorRow]) -> list[BudgetRow]:
    """A round as ranks and open operations grow."""
    rounds = {
        (row.case, row.ranks): row.round_us or 0.0
        for row in rows
        if row.case in (MACHINE, MACHINE_CROWDED) and row.groups == 1 and row.votes == 1
    }
    few, many = min(RANKS_COMPARED), max(RANKS_COMPARED)
    grown = [
        (
            f"a round of {many} ranks against one of {few}, for each rank",
            f"linear in ranks: <= {LINEAR_MAX:g} times",
            rounds.get((MACHINE, many), 0.0) / many,
            rounds.get((MACHINE, few), 0.0) / few,
            LINEAR_MAX,
        ),
        (
            f"a round with {COPIES_OPEN:,} operations open against none, {few} ranks",
            f"flat: <= {GROWTH_MAX:g} times",
            rounds.get((MACHINE_CROWDED, few), 0.0),
            rounds.get((MACHINE, few), 0.0),
            GROWTH_MAX,
        ),
    ]
    return [
        BudgetRow(
            what=what,
            budget=budget,
            measured=f"{large:.3g} us" if large else "not in a quick run",
            peer=f"{small:.3g} us",
            ratio=large / small if large and small else None,
            met=large / small <= limit if large and small else None,
        )
        for what, budget, large, small, limit in grown
    ]


def _imports_torch() -> bool:
    code = "import sys, kvcoord.runtime.coordinator; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode != 0


def _copies(rows: Sequence[CopyRow]) -> BudgetRow:
    counted = [row for row in rows if row.budget]
    worst = min(counted, key=lambda row: row.ratio_memcpy)
    met = sum(1 for row in counted if row.met)
    return BudgetRow(
        what=f"CPU copies of pages >= 16 KiB ({met} of {len(counted)} cases); the worst: {_copy_case(worst)}",
        budget=worst.budget,
        measured=f"{worst.gib_per_s:.3g} GiB/s",
        peer="one memcpy",
        ratio=worst.ratio_memcpy,
        met=met == len(counted),
    )


def _copy_case(row: CopyRow) -> str:
    return f"{row.case}, pages of {row.page_bytes >> 10} KiB, {row.copied}"


def _recovery(row: RecoveryRow) -> BudgetRow:
    return BudgetRow(
        what=f"{row.case} to the next decision, {row.ranks} ranks",
        budget=row.budget,
        measured=f"p50 {row.p50_s:.2f}, max {row.max_s:.2f} s",
        peer="",
        ratio=None,
        met=row.met,
    )
