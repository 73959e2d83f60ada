"""`bench trace`: two ways to agree on one trace, in one row, and no number for a run that went wrong."""

from typing import Any

import msgspec
import pytest

from kvcoord.errors import InvariantBroken
from kvcoord.load.bench import replays as module
from kvcoord.load.bench.replays import TraceOptions, TraceRow, replays, trace_row
from kvcoord.load.plan import Agreeing, ReplayPlan
from kvcoord.load.report import ReplayReport
from kvcoord.load.trace import DEMO

OPTIONS = TraceOptions(trace=str(DEMO), ranks=2, requests_max=5)

NUMBERS: dict[type, Any] = {int: 0, float: 0.0, bool: True}


def report(agreement: Agreeing, seconds: float, step_us: float, **changes: object) -> ReplayReport:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(ReplayReport):
        fields[field.name] = NUMBERS.get(field.type)
    fields |= {"trace": "/traces/t.jsonl", "agreement": agreement, "ranks": 2, "requests": 5, "pages_hit": 3}
    fields |= {"seconds": seconds, "step_us_p50": step_us, "step_us_p99": step_us * 3, **changes}
    return ReplayReport(**fields)


def test_a_row_has_the_medians_of_all_turns_of_both_sides() -> None:
    ours = [report(Agreeing.KVCOORD, seconds, 100.0) for seconds in (1.0, 9.0, 2.0)]
    peers = [report(Agreeing.GLOO, seconds, 400.0) for seconds in (8.0, 4.0, 100.0)]
    row = trace_row(ours, peers)
    assert (row.case, row.turns, row.requests, row.pages_hit) == ("t.jsonl", 3, 5, 3)
    assert (row.seconds, row.gloo_seconds, row.ratio_seconds) == (2.0, 8.0, 0.25)
    assert (row.step_p99_us, row.gloo_step_p99_us, row.ratio_step_p50) == (300.0, 1200.0, 0.25)


def test_without_a_peer_there_is_no_ratio() -> None:
    row = trace_row([report(Agreeing.KVCOORD, 1.0, 100.0)], [])
    assert (row.seconds, row.ratio_seconds, row.gloo_step_p50_us) == (1.0, None, None)


@pytest.mark.parametrize("changes", [{"pages_corrupt": 1}, {"pages_leaked": 2}, {"digests_equal": False}])
async def test_a_run_that_went_wrong_gives_no_number(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    async def replay(plan: ReplayPlan) -> ReplayReport:
        return report(plan.options.agreement, 1.0, 1.0, **changes)

    monkeypatch.setattr(module, "replay", replay)
    with pytest.raises(InvariantBroken, match="verifies every page"):
        await replays(OPTIONS, quick=True)


async def test_a_part_is_played_in_turn_and_the_whole_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[Agreeing, int | None]] = []

    async def replay(plan: ReplayPlan) -> ReplayReport:
        played.append((plan.options.agreement, plan.options.requests_max))
        return report(plan.options.agreement, 1.0, 1.0)

    monkeypatch.setattr(module, "replay", replay)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    result = await replays(TraceOptions(trace=str(DEMO), ranks=2), quick=False)
    assert [requests for _, requests in played] == [1000] * 6 + [None] * 2
    assert [agreement for agreement, _ in played] == [Agreeing.KVCOORD, Agreeing.GLOO] * 4
    assert len(result.rows) == 2


async def test_a_trace_is_played_without_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = await replays(OPTIONS, quick=True)
    (row,) = result.rows
    assert isinstance(row, TraceRow)
    assert row.requests == OPTIONS.requests_max
    assert row.seconds > 0
    assert row.ratio_seconds is None
    assert any("torch is not installed" in note for note in result.notes)
