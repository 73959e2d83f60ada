"""What a replay reports: the group's numbers once, and everything that must not be, found."""

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from kvcoord.domain import Aborted, OperationKind, Outcome, Path, Reason, Tier
from kvcoord.load.dialogue import DriverReport, Tally
from kvcoord.load.plan import ReplayOptions, ReplayPlan, plan_replay
from kvcoord.load.report import leaks_of, percentile, summarize
from kvcoord.load.table import table
from kvcoord.observability.snapshot import (
    CopySnapshot,
    DecisionCount,
    DivergenceSnapshot,
    PoolSnapshot,
    WorkerSnapshot,
)
from kvcoord.runtime.exits import Exit

CACHED = {Tier.DEVICE: 3, Tier.HOST: 6}

ABORT = Aborted("write-through/3/0", Path.VOTED, Reason.HOST_FULL, 1, {"host.kv": 2})


@pytest.fixture(scope="module")
def plan() -> ReplayPlan:
    return plan_replay(ReplayOptions(ranks=2, requests_max=3))


def driver(rank: int, **changes: int) -> DriverReport:
    tally = Tally(
        requests=3,
        steps=5,
        pages_total=20,
        pages_hit_device=4,
        pages_hit_host=6,
        pages_loaded=6,
        pages_verified=10,
        aborts_first={Reason.HOST_FULL: ABORT},
    )
    for name, value in changes.items():
        setattr(tally, name, value)
    return DriverReport(rank=rank, tally=tally, seconds=2.0, step_ns=[1000, 2000, 9000], advance_ns=[500, 1000, 4500])


def pool(tier: Tier, *, free: int, used: int, reserved: int = 0, quarantined: int = 0) -> PoolSnapshot:
    counts = {"free": free, "used": used, "reserved": reserved, "quarantined": quarantined}
    cached = CACHED[tier]
    return PoolSnapshot(name="kv", tier=tier, capacity=10, cached=cached, **counts)


def worker(rank: int, **changes: object) -> WorkerSnapshot:
    commit = DecisionCount(
        operation=OperationKind.WRITE_THROUGH, path=Path.COVERED, outcome=Outcome.COMMIT, count=7 + 2
    )
    abort = DecisionCount(
        operation=OperationKind.WRITE_THROUGH,
        path=Path.VOTED,
        outcome=Outcome.ABORT,
        reason=Reason.HOST_FULL,
        count=2,
    )
    asked = DecisionCount(operation=OperationKind.ALLOCATE, path=Path.IMMEDIATE, outcome=Outcome.COMMIT, count=1)
    snapshot = WorkerSnapshot(
        version="0",
        incarnation="",
        uptime_s=1.0,
        ready=True,
        group="replay",
        rank=rank,
        state="active",
        pools=[pool(Tier.DEVICE, free=7, used=3), pool(Tier.HOST, free=4, used=6)],
        pages_cached={tier.value: pages for tier, pages in CACHED.items()},
        pages_evicted={"device": 5, "host": 0},
        decisions=[commit, abort, asked],
        copies=[
            CopySnapshot(direction="device_to_host", bytes=600),
            CopySnapshot(direction="host_to_device", bytes=400),
        ],
        digest="1",
        index_digest="2",
    )
    return msgspec.structs.replace(snapshot, **changes)


def test_the_groups_numbers_count_once_and_bytes_are_of_all_ranks(plan: ReplayPlan) -> None:
    report = summarize(plan, [driver(0), driver(1)], [worker(0), worker(1)])
    assert (report.requests, report.pages_total, report.pages_hit) == (3, 20, 10)
    assert report.pages_hit_by_tier == {"device": 4, "host": 6}
    assert (report.commits, report.aborts) == (10, {"host_full": 2})
    assert (report.covered, report.voted, report.immediate) == (9, 2, 1)
    assert (report.bytes_moved, report.bytes_moved_per_s) == (2000, 1000.0)
    assert (report.step_us_p50, report.step_us_p99, report.step_us_max) == (2.0, 9.0, 9.0)
    assert report.advance_share == 0.5
    assert (report.pages_leaked, report.digests_equal, report.exit_code) == (0, True, Exit.OK)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"digest": "3"}, "digest"),
        ({"index_digest": "3"}, "index_digest"),
        ({"decisions": []}, "decisions"),
        ({"divergences": 1}, "divergences"),
        ({"pages_evicted": {"device": 5, "host": 1}}, "pages_evicted"),
    ],
)
def test_a_worker_that_differs_is_named_and_fails_the_replay(
    plan: ReplayPlan, changes: dict[str, object], name: str
) -> None:
    report = summarize(plan, [driver(0), driver(1)], [worker(0), worker(1, **changes)])
    assert not report.digests_equal
    assert report.exit_code is Exit.LOST
    assert [difference.startswith(name) for difference in report.differences] == [True]


@pytest.mark.parametrize("name", ["requests", "skipped", "steps", "pages_total", "pages_hit_device", "pages_hit_host"])
def test_an_engine_that_counts_otherwise_is_named_and_fails_the_replay(plan: ReplayPlan, name: str) -> None:
    report = summarize(plan, [driver(0), driver(1, **{name: 99})], [worker(0), worker(1)])
    assert not report.digests_equal
    assert [difference.startswith(f"{name}: rank 0") for difference in report.differences] == [True]


@pytest.mark.parametrize(
    ("held", "pages"),
    [
        (pool(Tier.HOST, free=4, used=6), 0),
        (pool(Tier.HOST, free=3, used=6, reserved=1), 1),
        (pool(Tier.HOST, free=2, used=6, quarantined=2), 2),
        (pool(Tier.HOST, free=1, used=9), 3),
        (pool(Tier.HOST, free=3, used=6), 1),
        (pool(Tier.HOST, free=5, used=5), 1),
    ],
    ids=["none", "reserved", "quarantined", "used by others", "in no state", "cached without a slot"],
)
def test_every_page_that_is_neither_free_nor_cached_has_leaked(held: PoolSnapshot, pages: int) -> None:
    assert sum(leak.pages for leak in leaks_of(worker(0, pools=[held]))) == pages


def test_a_leak_or_a_wrong_page_on_any_rank_fails_the_replay(plan: ReplayPlan) -> None:
    leaking = worker(1, pools=[pool(Tier.DEVICE, free=6, used=3, reserved=1), pool(Tier.HOST, free=4, used=6)])
    report = summarize(plan, [driver(0), driver(1)], [worker(0), leaking])
    assert (report.pages_leaked, report.exit_code) == (1, Exit.FAILURE)
    corrupt = summarize(plan, [driver(0), driver(1, pages_corrupt=1)], [worker(0), worker(1)])
    assert (corrupt.pages_corrupt, corrupt.exit_code) == (1, Exit.FAILURE)


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    assert [percentile(range(1, 101), percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert [percentile([7], percent) for percent in (1, 50, 100)] == [7, 7, 7]
    assert percentile([], 50) == 0


def test_the_table_shows_what_must_hold_and_what_went_wrong(plan: ReplayPlan) -> None:
    found = DivergenceSnapshot(round=17, sides=[[0], [1]], operation="commit write-through/3/0 2 (ranks 0)")
    workers = [worker(0, first_divergence=found), worker(1, digest="3", divergences=1)]
    console = Console(width=200, file=StringIO())
    console.print(table(summarize(plan, [driver(0), driver(1)], workers)))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "write-through/3/0 aborted (host_full, rank 1, host.kv short by 2 pages)" in text
    assert "round 17: ranks 0 against ranks 1; commit write-through/3/0 2 (ranks 0)" in text
    assert "9 covered, 2 voted, 1 immediate" in text
