"""What a replay works out from its options before it starts anything."""

from pathlib import Path

import pytest

from kvcoord.domain import DivergencePolicy
from kvcoord.errors import ConfigError, UsageError
from kvcoord.load.plan import Agreeing, ReplayOptions, plan_replay
from kvcoord.load.trace import Request, statistics, write

REQUESTS = [
    Request(timestamp_ms=0, input_length=1, output_length=1, hash_ids=(1, 2, 3)),
    Request(timestamp_ms=1, input_length=1, output_length=1, hash_ids=(1, 2, 4, 5)),
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    write(path, REQUESTS)
    return str(path)


def test_unlimited_pools_hold_every_distinct_page_of_the_trace(trace: str) -> None:
    plan = plan_replay(ReplayOptions(trace=trace, ranks=3, unlimited=True))
    distinct = statistics(REQUESTS).pages_distinct
    assert plan.device_pages == plan.host_pages == (distinct,) * 3


def test_one_number_is_for_all_ranks_and_a_list_for_each(trace: str) -> None:
    plan = plan_replay(ReplayOptions(trace=trace, ranks=3, device_pages=(8,), host_pages=(9, 8, 9)))
    assert plan.device_pages == (8, 8, 8)
    assert plan.host_pages == (9, 8, 9)
    assert [plan.worker(rank, Path("/x")).host_pages for rank in range(3)] == [9, 8, 9]
    assert {plan.driver(rank, Path("/x"), -1, -1).pages_that_fit for rank in range(3)} == {8}


def test_derived_pools_hold_the_longest_request(trace: str) -> None:
    plan = plan_replay(ReplayOptions(trace=trace, ranks=2))
    assert min(plan.device_pages) >= 4
    assert min(plan.host_pages) > min(plan.device_pages)


def test_pipeline_stages_are_joined_by_equal_position_and_lag_covers_them(trace: str) -> None:
    plan = plan_replay(ReplayOptions(trace=trace, tp=2, pp=3))
    assert plan.group.world_size == 6
    assert plan.group.lag == 3
    assert plan.stage_links() == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_ranks_that_decide_alone_go_on_when_they_diverge(trace: str) -> None:
    alone = plan_replay(ReplayOptions(trace=trace, ranks=2, agreement=Agreeing.NONE))
    assert alone.group.divergence is DivergencePolicy.WARN
    assert alone.driver(0, Path("/x"), -1, -1).alone
    agreed = plan_replay(ReplayOptions(trace=trace, ranks=2))
    assert agreed.group.divergence is DivergencePolicy.STOP
    assert not agreed.driver(0, Path("/x"), -1, -1).alone


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("host-pages", {"ranks": 3, "host_pages": (9, 8)}),
        ("device-pages", {"ranks": 2, "device_pages": (0,)}),
        ("pools", {"ranks": 2, "unlimited": True, "host_pages": (9,)}),
        ("speed-up", {"ranks": 2, "speed_up": -1.0}),
        ("slow-copy", {"ranks": 2, "slow_copy_s": {2: 0.1}}),
        ("jitter", {"ranks": 2, "jitter_s": {1: 11.0}}),
        ("agreement", {"ranks": 2, "pp": 2, "agreement": Agreeing.GLOO}),
        ("trace", {"ranks": 2, "requests_max": 0}),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(trace: str, field: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        plan_replay(ReplayOptions(**{"trace": trace, **options}))  # type: ignore[arg-type]
    assert refused.value.field == field


def test_ranks_that_are_not_tp_times_pp_are_refused(trace: str) -> None:
    with pytest.raises(ConfigError):
        plan_replay(ReplayOptions(trace=trace, ranks=3, tp=2, pp=2))
