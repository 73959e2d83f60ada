"""Metrics and snapshots: every number right, none negative, none twice, all bounded."""

import re
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvcoord.domain import OperationKind, Outcome, Path, Reason, Tier
from kvcoord.durations import Durations
from kvcoord.observability.catalogue import CoordinatorFamilies, Kind, ProcessFamilies, WorkerFamilies
from kvcoord.observability.metrics import CoordinatorMetrics, WorkerMetrics
from kvcoord.observability.snapshot import (
    CoordinatorSnapshot,
    CopySnapshot,
    DecisionCount,
    GroupSnapshot,
    HistogramSnapshot,
    PoolSnapshot,
    RankSnapshot,
    Snapshot,
    WorkerSnapshot,
    decision_counts,
    histogram_of,
)


def full_histogram() -> HistogramSnapshot:
    histogram = Durations((0.001, 0.01))
    for duration_s in (0.0005, 0.001, 0.002, 5.0):
        histogram.observe(duration_s)
    return histogram_of(histogram)


DECISIONS = [
    DecisionCount(operation=OperationKind.LOAD_BACK, path=Path.VOTED, outcome=Outcome.COMMIT, count=10),
    DecisionCount(
        operation=OperationKind.LOAD_BACK,
        path=Path.VOTED,
        outcome=Outcome.ABORT,
        reason=Reason.DEVICE_FULL,
        count=1,
    ),
]

GROUP = GroupSnapshot(
    name='model "a"\n',
    state="active",
    ready=True,
    epoch=2,
    world_size=2,
    ranks=[RankSnapshot(rank=0, state="active", last_heard_s=0.25, round=8), RankSnapshot(rank=1, state="absent")],
    round=7,
    rounds_closed=5,
    round_close=full_histogram(),
    operations_open=3,
    free_pages={"kv": 12},
    decisions=DECISIONS,
    retractions={"copy_failed": 1},
    divergences=0,
    ranks_lost=1,
)

COORDINATOR = CoordinatorSnapshot(
    version="0.1.0",
    incarnation="c0ffee",
    uptime_s=12.5,
    ready=True,
    received={"Vote": 22},
    ignored={"stale_epoch": 4, "duplicate": 2},
    events_recorded=100,
    groups=[GROUP],
    joins_refused={"page_size": 1},
)

WORKER = WorkerSnapshot(
    version="0.1.0",
    incarnation="beef",
    uptime_s=3.0,
    ready=False,
    ready_reason="rank 1 is absent",
    received={"Decision": 11},
    ignored={"oversized": 1},
    group="a",
    rank=1,
    state="active",
    coordinator_last_heard_s=0.1,
    heartbeats_sent=6,
    pools=[PoolSnapshot(name="kv", tier=Tier.HOST, capacity=8, free=1, reserved=2, used=4, quarantined=1)],
    pages_cached={"host": 4},
    pages_requested=60,
    pages_hit={"host": 40, "device": 0},
    pages_evicted={"host": 3},
    decisions=DECISIONS,
    retractions={"copy_failed": 1},
    copies=[CopySnapshot(direction="host_to_device", transfers=10, pages=40, bytes=4096, duration=full_histogram())],
    step=full_histogram(),
)


def parse(page: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def values(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and sorted labels. Fails when one appears twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parse(page).values():
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(page: bytes, name: str, labels: Mapping[str, str] = {}) -> float:
    return values(page)[name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize("families", [CoordinatorFamilies(), WorkerFamilies()], ids=["coordinator", "worker"])
def test_every_declared_metric_is_on_the_page_and_has_a_sample(families: ProcessFamilies) -> None:
    if isinstance(families, CoordinatorFamilies):
        broken = msgspec.structs.replace(COORDINATOR, uptime_s=-1.0)
        page = CoordinatorMetrics(lambda: broken).render()
    else:
        worker = msgspec.structs.replace(WORKER, uptime_s=-1.0)
        page = WorkerMetrics(lambda: worker).render()
    parsed = parse(page)
    for family in families.declared.families:
        metric = parsed[family.name.removesuffix("_total")]
        assert metric.type == family.kind
        assert metric.documentation == family.help
        assert metric.samples or family is families.uptime, family.name


@pytest.mark.parametrize("families", [CoordinatorFamilies(), WorkerFamilies()], ids=["coordinator", "worker"])
def test_names_carry_prefix_and_unit_and_only_counters_end_in_total(families: ProcessFamilies) -> None:
    names = [family.name for family in families.declared.families]
    assert len(set(names)) == len(names)
    for family in families.declared.families:
        assert re.fullmatch(r"kvcoord_(coordinator|worker)_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.kind is not Kind.HISTOGRAM or family.name.endswith("_seconds")


def test_ten_loads_of_four_pages_and_one_abort_read_the_same_at_the_coordinator_and_at_every_rank() -> None:
    commit = {"operation": "load-back", "path": "voted", "outcome": "commit", "reason": ""}
    abort = {"operation": "load-back", "path": "voted", "outcome": "abort", "reason": "device_full"}
    coordinator = CoordinatorMetrics(lambda: COORDINATOR).render()
    assert value(coordinator, "kvcoord_coordinator_decisions_total", {"group": GROUP.name, **commit}) == 10
    assert value(coordinator, "kvcoord_coordinator_decisions_total", {"group": GROUP.name, **abort}) == 1
    for rank in (0, 1):
        worker = msgspec.structs.replace(WORKER, rank=rank)
        page = WorkerMetrics(lambda worker=worker: worker).render()  # type: ignore[misc]
        scope = {"group": "a", "rank": str(rank)}
        assert value(page, "kvcoord_worker_decisions_total", {**scope, **commit}) == 10
        assert value(page, "kvcoord_worker_decisions_total", {**scope, **abort}) == 1
        assert value(page, "kvcoord_worker_pages_hit_total", {**scope, "tier": "host"}) == 40


def test_the_states_of_a_pool_add_up_to_its_capacity_on_the_page() -> None:
    page = WorkerMetrics(lambda: WORKER).render()
    states = {
        dict(labels)["state"]: number for (name, labels), number in values(page).items() if name.endswith("_pool_pages")
    }
    assert states == {"free": 1, "reserved": 2, "used": 4, "quarantined": 1}
    pool = {"group": "a", "rank": "1", "pool": "kv", "tier": "host"}
    assert value(page, "kvcoord_worker_pool_capacity_pages", pool) == sum(states.values())


def test_ignored_messages_are_counted_by_cause() -> None:
    page = CoordinatorMetrics(lambda: COORDINATOR).render()
    assert value(page, "kvcoord_coordinator_messages_ignored_total", {"cause": "stale_epoch"}) == 4
    assert value(page, "kvcoord_coordinator_messages_ignored_total", {"cause": "duplicate"}) == 2


def test_a_rank_never_heard_of_has_no_age_instead_of_a_made_up_one() -> None:
    page = CoordinatorMetrics(lambda: COORDINATOR).render()
    (heard,) = parse(page)["kvcoord_coordinator_rank_last_heard_seconds"].samples
    assert (heard.labels["rank"], heard.value) == ("0", 0.25)
    assert value(page, "kvcoord_coordinator_rank_state", {"group": GROUP.name, "rank": "1", "state": "absent"}) == 1


@pytest.mark.parametrize("impossible", [-1.0, float("nan"), float("inf")])
def test_an_impossible_value_is_withheld_and_counted_at_every_scrape(impossible: float) -> None:
    worker = msgspec.structs.replace(WORKER, coordinator_last_heard_s=impossible)
    metrics = WorkerMetrics(lambda: worker)
    name = "kvcoord_worker_coordinator_last_heard_seconds"
    for scrape in (1, 2):
        page = metrics.render()
        assert parse(page)[name].samples == []
        assert value(page, "kvcoord_worker_samples_invalid_total", {"metric": name}) == scrape
    assert all(number >= 0 for number in values(page).values())


def test_an_impossible_histogram_is_withheld_whole() -> None:
    histogram = Durations((1.0,))
    histogram.observe(-5.0)
    worker = msgspec.structs.replace(WORKER, step=histogram_of(histogram))
    page = WorkerMetrics(lambda: worker).render()
    assert parse(page)["kvcoord_worker_step_seconds"].samples == []
    assert value(page, "kvcoord_worker_samples_invalid_total", {"metric": "kvcoord_worker_step_seconds"}) == 1


def test_a_histogram_counts_a_value_on_a_bound_as_not_above_it() -> None:
    page = WorkerMetrics(lambda: WORKER).render()
    scope = {"group": "a", "rank": "1"}
    buckets = [
        value(page, "kvcoord_worker_step_seconds_bucket", {**scope, "le": bound}) for bound in ("0.001", "0.01", "+Inf")
    ]
    assert buckets == [2, 3, 4]
    assert value(page, "kvcoord_worker_step_seconds_count", scope) == 4
    assert value(page, "kvcoord_worker_step_seconds_sum", scope) == pytest.approx(5.0035)


@given(
    durations_s=st.lists(st.floats(0, 20), max_size=30),
    bounds_s=st.lists(st.floats(0.001, 10), min_size=1, unique=True),
)
def test_a_histogram_loses_no_value(durations_s: list[float], bounds_s: list[float]) -> None:
    ordered = tuple(sorted(bounds_s))
    histogram = Durations(ordered)
    for duration_s in durations_s:
        histogram.observe(duration_s)
    counts = histogram_of(histogram).counts
    assert sum(counts) == len(durations_s)
    for index, bound_s in enumerate(ordered):
        assert sum(counts[: index + 1]) == sum(duration_s <= bound_s for duration_s in durations_s)


def test_ranks_beyond_the_limit_have_no_series_and_are_counted() -> None:
    ranks = [RankSnapshot(rank=rank, state="active") for rank in range(4)]
    groups = [GroupSnapshot(name=name, state="active", world_size=4, ranks=ranks) for name in ("a", "b", "c")]
    coordinator = msgspec.structs.replace(COORDINATOR, groups=groups)
    page = CoordinatorMetrics(lambda: coordinator, ranks_shown_max=6).render()
    shown = [
        (sample.labels["group"], sample.labels["rank"])
        for sample in parse(page)["kvcoord_coordinator_rank_round"].samples
    ]
    assert shown == [("a", "0"), ("a", "1"), ("a", "2"), ("a", "3"), ("b", "0"), ("b", "1")]
    assert value(page, "kvcoord_coordinator_ranks_hidden") == 6
    assert value(page, "kvcoord_coordinator_world_size", {"group": "c"}) == 4


def test_two_coordinators_in_one_process_do_not_share_a_registry_and_a_scrape_reads_the_newest_snapshot() -> None:
    current = COORDINATOR
    first, second = CoordinatorMetrics(lambda: current), CoordinatorMetrics(lambda: COORDINATOR)
    current = msgspec.structs.replace(COORDINATOR, uptime_s=99.0)
    assert value(first.render(), "kvcoord_coordinator_uptime_seconds") == 99.0
    assert value(second.render(), "kvcoord_coordinator_uptime_seconds") == 12.5


def test_making_metrics_takes_no_snapshot() -> None:
    calls: list[None] = []

    def snapshot() -> CoordinatorSnapshot:
        calls.append(None)
        return COORDINATOR

    metrics = CoordinatorMetrics(snapshot)
    assert calls == []
    metrics.render()
    assert len(calls) == 1


def test_the_order_of_decision_counts_does_not_depend_on_the_order_of_counting() -> None:
    counters = {
        (OperationKind.LOAD_BACK, Path.VOTED, Outcome.COMMIT, None): 10,
        (None, Path.COVERED, Outcome.COMMIT, None): 2,
        (OperationKind.LOAD_BACK, Path.VOTED, Outcome.ABORT, Reason.DEVICE_FULL): 1,
    }
    forwards = decision_counts(counters)
    assert forwards == decision_counts(dict(reversed(counters.items())))
    assert [count.count for count in forwards] == [2, 1, 10]


@pytest.mark.parametrize("snapshot", [COORDINATOR, WORKER], ids=["coordinator", "worker"])
def test_a_status_body_reads_back_as_the_snapshot_of_its_process(snapshot: Snapshot) -> None:
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot
