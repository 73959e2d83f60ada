"""The benchmarks of single parts: small cases of each, and how budgets are judged from their rows."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from kvcoord.dma.engine import Direction
from kvcoord.load.bench import copies
from kvcoord.load.bench.budgets import judge
from kvcoord.load.bench.coordinator import MACHINE, MACHINE_CROWDED, CoordinatorRow
from kvcoord.load.bench.copies import CONTIGUOUS, RUNS, SCATTERED, CopyCase, CopyRow, slots
from kvcoord.load.bench.index import OPERATIONS, PeerTimes, index_rows, measure
from kvcoord.load.bench.recovery import RecoveryRow, Successor, recover
from kvcoord.load.bench.result import Budget, Series, compare
from kvcoord.load.bench.scale import FEW_RANKS, FITTED_RANKS, MANY_VOTES, Model, fit, scale_row
from kvcoord.load.bench.served import serve


def case(arrangement: str) -> CopyCase:
    return CopyCase(arrangement=arrangement, page_bytes=64 << 10, layers=16, direction=Direction.DEVICE_TO_HOST)


@pytest.mark.parametrize(("arrangement", "runs"), [(CONTIGUOUS, 1), (RUNS, 8), (SCATTERED, 64)])
def test_slots_are_as_scattered_as_the_case_says(arrangement: str, runs: int) -> None:
    named = slots(case(arrangement), seed=1)
    assert sorted(named) == list(range(case(arrangement).pages))
    breaks = sum(1 for before, after in pairwise(named) if after != before + 1)
    assert breaks + 1 == pytest.approx(runs, abs=3)


async def test_a_copy_is_measured_against_a_memcpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CASE_BYTES", 1 << 20)
    result = await copies.copies(quick=True)
    assert len(result.rows) == 2 * 4 * 2
    for row in result.rows:
        assert isinstance(row, CopyRow)
        assert row.gib_per_s > 0
        assert row.ratio_memcpy > 0
        assert (row.met is None) == (row.page_bytes < 16 << 10)


def test_every_operation_of_the_index_is_measured() -> None:
    times = measure(800)
    assert set(times) == set(OPERATIONS)
    assert all(each for each in times.values())


def test_the_index_is_judged_against_the_rust_core_alone() -> None:
    times = {operation: [10.0] for operation in OPERATIONS}
    peers = [
        PeerTimes(core="rust", pages=1, match_us=20.0, insert_us=5.0),
        PeerTimes(core="python", pages=1, match_us=40.0, insert_us=50.0),
    ]
    rows = {(row.case, row.peer): row for row in index_rows(1000, times, peers)}
    assert rows["match", "SGLang's rust core"].met is True
    assert rows["insert", "SGLang's rust core"].met is False
    assert rows["match", "SGLang's python core"].met is None
    assert rows["evict", ""].ratio_p50 is None


def test_the_model_gives_back_what_it_was_fitted_to() -> None:
    truth = Model(verdict_us=9.0, frame_us=3.0, vote_us=0.5)
    sizes = ((FEW_RANKS, 0), (FITTED_RANKS, 0), (FITTED_RANKS, MANY_VOTES))
    model = fit(*(truth.round_us(ranks, votes) for ranks, votes in sizes))
    assert model.round_us(512, 7) == pytest.approx(truth.round_us(512, 7))


def test_a_core_is_full_when_its_groups_fill_a_step() -> None:
    row = scale_row(64, 1, 250.0, Model(0.0, 4.0, 0.0))
    assert (row.core_share, row.groups_max, row.model_us) == (0.05, 20, 256.0)


async def test_a_coordinator_process_is_measured_under_load_and_idle() -> None:
    served = await serve(2, votes=2, rounds=20, idle_s=0.1)
    assert served.ready_s > 0
    assert served.resident_bytes > 1 << 20
    assert served.round_cpu_s >= 0


async def test_ranks_agree_again_after_their_coordinator_was_killed() -> None:
    recovered = await recover(2, Successor.STANDBY)
    assert recovered.seconds > 0


def coordinator_row(**fields: object) -> CoordinatorRow:
    return CoordinatorRow(case="machine", groups=1, votes=64, **fields)  # type: ignore[arg-type]


def copy_row(ratio: float, *, met: bool) -> CopyRow:
    return CopyRow(
        case="scattered, 1 layers",
        page_bytes=16384,
        layers=1,
        pages=4,
        direction="device-to-host",
        copied="thread",
        gib_per_s=4.0,
        ratio_memcpy=ratio,
        ratio_torch=None,
        budget=">= 0.8 of one memcpy",
        met=met,
    )


def benchmark_rows() -> dict[str, Sequence[msgspec.Struct]]:
    ours, peer = Series("ours", [10.0]), Series("gloo", [40.0])
    return {
        "agreement": [compare("step", 4, ours, peer, Budget(ratio_p50_max=0.1)), compare("no budget", 4, ours, peer)],
        "local": [],
        "index": index_rows(1000, {operation: [10.0] for operation in OPERATIONS}, []),
        "coordinator": [
            coordinator_row(ranks=4, votes_per_s=9e5, budget=">= 500,000 votes/s", met=True),
            coordinator_row(ranks=64, votes_per_s=4e5, budget=">= 500,000 votes/s", met=False),
        ],
        "copy": [copy_row(0.9, met=True), copy_row(0.4, met=False)],
        "recovery": [
            RecoveryRow(
                case="kill -9, standby", ranks=2, runs=1, p50_s=0.1, max_s=0.2, decisions_aborted=0, budget="", met=True
            )
        ],
    }


def test_budgets_show_the_worst_row_and_leave_out_rows_without_a_budget() -> None:
    rows = {row.what: row for row in judge(benchmark_rows())}
    assert rows["step, 4 ranks"].met is False
    assert "no budget, 4 ranks" not in rows
    votes = next(row for what, row in rows.items() if what.startswith("votes tallied"))
    assert (votes.met, "64 ranks" in votes.what) == (False, True)
    copying = next(row for what, row in rows.items() if what.startswith("CPU copies"))
    assert (copying.met, copying.ratio, "(1 of 2 cases)" in copying.what) == (False, 0.4, True)
    assert rows["CUDA copies"].met is None


def test_growth_is_judged_by_rounds_of_one_vote() -> None:
    def round_row(case: str, ranks: int, round_us: float, votes: int = 1) -> CoordinatorRow:
        return CoordinatorRow(case=case, ranks=ranks, groups=1, votes=votes, round_us=round_us)

    rows = benchmark_rows()
    rows["coordinator"] = [
        *rows["coordinator"],
        round_row(MACHINE, 4, 40.0),
        round_row(MACHINE, 64, 1280.0),
        round_row(MACHINE, 64, 9e9, votes=16),
        round_row(MACHINE_CROWDED, 4, 48.0),
    ]
    judged = {row.budget.partition(":")[0]: row for row in judge(rows) if row.what.startswith("a round")}
    assert (judged["linear in ranks"].ratio, judged["linear in ranks"].met) == (2.0, False)
    assert (judged["flat"].ratio, judged["flat"].met) == (1.2, True)
    quick = [row for row in judge(benchmark_rows()) if row.what.startswith("a round")]
    assert [(row.met, row.measured) for row in quick] == [(None, "not in a quick run")] * 2


def test_an_index_without_a_peer_is_not_judged_against_it() -> None:
    rows = {row.what: row for row in judge(benchmark_rows())}
    assert rows["index: match a path of 188 pages, 1,000 cached"].met is None
