"""Prometheus metrics, made from a snapshot when somebody scrapes and at no other time.

Each class owns a registry, so that two in one process do not meet; the hot path only adds to plain integers that
live elsewhere. A value that is negative or not finite never leaves: it is withheld and counted, because a wrong
number is worse than a missing one and a hidden defect is worse than both.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcoord.observability.catalogue import (
    RANKS_SHOWN_MAX,
    CoordinatorFamilies,
    Family,
    Kind,
    ProcessFamilies,
    WorkerFamilies,
)
from kvcoord.observability.snapshot import (
    CoordinatorSnapshot,
    CopySnapshot,
    DecisionCount,
    GroupSnapshot,
    HistogramSnapshot,
    PoolSnapshot,
    ProcessSnapshot,
    RankSnapshot,
    WorkerSnapshot,
)

S = TypeVar("S", bound=ProcessSnapshot)

Labels = tuple[str, ...]


class _Scrape:
    """The samples of one scrape, put into their families. `invalid` counts withheld values by metric name."""

    def __init__(self, families: Iterable[Family], invalid: dict[str, int]) -> None:
        self._open = {family.name: _open(family) for family in families}
        self._invalid = invalid

    def add(self, family: Family, labels: Labels, value: float) -> None:
        if 0 <= value < math.inf:
            metric = self._open[family.name]
            assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
            metric.add_metric(labels, value)
        else:
            self._withhold(family)

    def add_each(self, family: Family, labels: Labels, values: Mapping[str, int]) -> None:
        """One sample for each entry, whose key is the last label."""
        for name in sorted(values):
            self.add(family, (*labels, name), values[name])

    def add_histogram(self, family: Family, labels: Labels, histogram: HistogramSnapshot | None) -> None:
        if histogram is None:
            return
        if min(histogram.counts) < 0 or not 0 <= histogram.sum_s < math.inf:
            self._withhold(family)
            return
        metric = self._open[family.name]
        assert isinstance(metric, HistogramMetricFamily)
        bounds = [*map(repr, histogram.bounds_s), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        metric.add_metric(labels, buckets, histogram.sum_s)

    def metrics(self) -> list[Metric]:
        return list(self._open.values())

    def _withhold(self, family: Family) -> None:
        self._invalid[family.name] = self._invalid.get(family.name, 0) + 1


class _Metrics(Collector, Generic[S]):
    """What the metrics of both processes share: the registry, and how a scrape is made."""

    def __init__(self, process: str, families: ProcessFamilies, snapshot: Callable[[], S]) -> None:
        self._process_families = families
        self._snapshot = snapshot
        self._invalid: dict[str, int] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(namespace=f"kvcoord_{process}", registry=self.registry)

    def render(self) -> bytes:
        """The page in the Prometheus text format, UTF-8. What `snapshot` raises passes through."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return [_open(family) for family in self._process_families.declared.families]

    def collect(self) -> Iterable[Metric]:
        snapshot, families = self._snapshot(), self._process_families
        scrape = _Scrape(families.declared.families, self._invalid)
        scrape.add(families.info, (snapshot.version, snapshot.incarnation), 1)
        scrape.add(families.uptime, (), snapshot.uptime_s)
        scrape.add(families.ready, (), int(snapshot.ready))
        scrape.add_each(families.received, (), snapshot.received)
        scrape.add_each(families.ignored, (), snapshot.ignored)
        scrape.add(families.events, (), snapshot.events_recorded)
        scrape.add(families.events_dropped, (), snapshot.events_dropped)
        self._add_own(scrape, snapshot)
        scrape.add_each(families.invalid, (), self._invalid)
        return scrape.metrics()

    @abstractmethod
    def _add_own(self, scrape: _Scrape, snapshot: S) -> None:
        """Add what only this process has."""

    def _add_membership(self, scrape: _Scrape, scope: Labels, source: GroupSnapshot | WorkerSnapshot) -> None:
        families = self._process_families
        scrape.add(families.state, (*scope, source.state), 1)
        scrape.add(families.epoch, scope, source.epoch)
        scrape.add(families.round, scope, source.round)
        scrape.add(families.operations_open, scope, source.operations_open)
        for decision in source.decisions:
            scrape.add(families.decisions, (*scope, *_decision_labels(decision)), decision.count)
        scrape.add_each(families.retractions, scope, source.retractions)
        scrape.add(families.divergences, scope, source.divergences)


class CoordinatorMetrics(_Metrics[CoordinatorSnapshot]):
    """The metrics of a coordinator and all its groups. `snapshot` is called once for each scrape.

    Ranks beyond `ranks_shown_max`, in the order of the snapshot, have no series of their own and are counted instead.
    """

    def __init__(self, snapshot: Callable[[], CoordinatorSnapshot], ranks_shown_max: int = RANKS_SHOWN_MAX) -> None:
        self._families = CoordinatorFamilies()
        self._ranks_shown_max = ranks_shown_max
        super().__init__("coordinator", self._families, snapshot)

    def _add_own(self, scrape: _Scrape, snapshot: CoordinatorSnapshot) -> None:
        scrape.add_each(self._families.joins_refused, (), snapshot.joins_refused)
        ranks_left = self._ranks_shown_max
        hidden = 0
        for group in snapshot.groups:
            self._add_group(scrape, group)
            for rank in group.ranks[:ranks_left]:
                self._add_rank(scrape, group.name, rank)
            hidden += max(0, len(group.ranks) - ranks_left)
            ranks_left = max(0, ranks_left - len(group.ranks))
        scrape.add(self._families.ranks_hidden, (), hidden)

    def _add_group(self, scrape: _Scrape, group: GroupSnapshot) -> None:
        families, scope = self._families, (group.name,)
        self._add_membership(scrape, scope, group)
        scrape.add(families.world_size, scope, group.world_size)
        scrape.add(families.group_ready, scope, int(group.ready))
        scrape.add(families.rounds, scope, group.rounds_closed)
        scrape.add_histogram(families.round_close, scope, group.round_close)
        scrape.add_each(families.free, scope, group.free_pages)
        scrape.add(families.ranks_lost, scope, group.ranks_lost)

    def _add_rank(self, scrape: _Scrape, group: str, rank: RankSnapshot) -> None:
        scope = (group, str(rank.rank))
        scrape.add(self._families.rank_state, (*scope, rank.state), 1)
        scrape.add(self._families.rank_round, scope, rank.round)
        if rank.last_heard_s is not None:
            scrape.add(self._families.rank_heard, scope, rank.last_heard_s)


class WorkerMetrics(_Metrics[WorkerSnapshot]):
    """The metrics of one rank's process. `snapshot` is called once for each scrape."""

    def __init__(self, snapshot: Callable[[], WorkerSnapshot]) -> None:
        self._families = WorkerFamilies()
        super().__init__("worker", self._families, snapshot)

    def _add_own(self, scrape: _Scrape, snapshot: WorkerSnapshot) -> None:
        families, scope = self._families, (snapshot.group, str(snapshot.rank))
        self._add_membership(scrape, scope, snapshot)
        if snapshot.coordinator_last_heard_s is not None:
            scrape.add(families.heard, scope, snapshot.coordinator_last_heard_s)
        scrape.add(families.heartbeats, scope, snapshot.heartbeats_sent)
        scrape.add_each(families.cached, scope, snapshot.pages_cached)
        scrape.add(families.requested, scope, snapshot.pages_requested)
        scrape.add_each(families.hit, scope, snapshot.pages_hit)
        scrape.add_each(families.evicted, scope, snapshot.pages_evicted)
        scrape.add_histogram(families.step, scope, snapshot.step)
        for pool in snapshot.pools:
            self._add_pool(scrape, (*scope, pool.name, pool.tier), pool)
        for copy in snapshot.copies:
            self._add_copies(scrape, (*scope, copy.direction), copy)

    def _add_pool(self, scrape: _Scrape, scope: Labels, pool: PoolSnapshot) -> None:
        scrape.add(self._families.pool_capacity, scope, pool.capacity)
        scrape.add(self._families.pool, (*scope, "free"), pool.free)
        scrape.add(self._families.pool, (*scope, "reserved"), pool.reserved)
        scrape.add(self._families.pool, (*scope, "used"), pool.used)
        scrape.add(self._families.pool, (*scope, "quarantined"), pool.quarantined)

    def _add_copies(self, scrape: _Scrape, scope: Labels, copy: CopySnapshot) -> None:
        families = self._families
        scrape.add(families.copies, scope, copy.transfers)
        scrape.add(families.copies_failed, scope, copy.failed)
        scrape.add(families.copied_pages, scope, copy.pages)
        scrape.add(families.copied_bytes, scope, copy.bytes)
        scrape.add_histogram(families.copy, scope, copy.duration)


def _open(family: Family) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    if family.kind is Kind.COUNTER:
        return CounterMetricFamily(family.name, family.help, labels=family.labels)
    if family.kind is Kind.GAUGE:
        return GaugeMetricFamily(family.name, family.help, labels=family.labels)
    return HistogramMetricFamily(family.name, family.help, labels=family.labels)


def _decision_labels(decision: DecisionCount) -> Labels:
    return (decision.operation or "", decision.path, decision.outcome, decision.reason or "")
