"""What a worker shows of itself: the one source of its `/status`, `/metrics` and of `kvcoord status`."""

from collections.abc import Mapping

import kvcoord
from kvcoord.config.process import WorkerConfig
from kvcoord.controller.worker import WorkerMachine
from kvcoord.dma.engine import CopyStatistics, DirectionStatistics
from kvcoord.domain import Tier
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.observability.snapshot import (
    CopySnapshot,
    DivergenceSnapshot,
    PoolSnapshot,
    WorkerSnapshot,
    decision_counts,
)
from kvcoord.protocol.messages import epoch_number


def worker_snapshot(
    config: WorkerConfig,
    machine: WorkerMachine,
    copies: CopyStatistics,
    recorder: FlightRecorder,
    *,
    coordinator: str,
    incarnation: int,
    uptime_s: float,
    received: Mapping[str, int],
    ignored: Mapping[str, int],
) -> WorkerSnapshot:
    """Collects the counters of the machine, its pools and its copies at this moment."""
    state, rank = machine.cache.state, machine.rank
    counters = state.counters
    not_ready = machine.not_ready
    return WorkerSnapshot(
        version=kvcoord.__version__,
        incarnation=f"{incarnation:x}",
        uptime_s=uptime_s,
        ready=not not_ready,
        ready_reason=not_ready,
        received=dict(received),
        ignored=_ignored(machine, ignored),
        events_recorded=recorder.recorded,
        events_dropped=recorder.dropped,
        group=config.group.name,
        rank=config.rank,
        state="active" if rank is None else rank.state.value,
        epoch=0 if rank is None else epoch_number(rank.epoch),
        round=max(machine.step, 0),
        coordinator=coordinator,
        operations_open=machine.cache.open_count(),
        pools=_pools(machine),
        pages_cached={tier.value: state.tree.pages(tier) for tier in Tier},
        pages_hit={tier.value: pages for tier, pages in counters.pages_hit.items()},
        pages_evicted={tier.value: pages for tier, pages in counters.pages_evicted.items()},
        pages_requested=counters.pages_requested,
        decisions=decision_counts(counters.decisions),
        retractions={reason.value: count for reason, count in counters.retractions.items()},
        divergences=machine.divergences,
        first_divergence=_divergence(machine),
        copies=[
            _copies("device_to_host", copies.device_to_host, counters.pages_copied[Tier.HOST]),
            _copies("host_to_device", copies.host_to_device, counters.pages_copied[Tier.DEVICE]),
        ],
        leases_open=len(state.leases),
        digest=f"{state.digest.chain:016x}",
        index_digest=f"{state.tree.digest:016x}",
    )


def _pools(machine: WorkerMachine) -> list[PoolSnapshot]:
    state = machine.cache.state
    own = 0 if state.shares is None else state.shares.own
    cached = {tier: [state.tree.pages(tier)] * state.pools.page_pools + state.tree.tails.counts(tier) for tier in Tier}
    return [
        PoolSnapshot(
            name=pool.name.partition(".")[2],
            tier=tier,
            capacity=pool.capacity,
            free=pool.free_count,
            reserved=pool.reserved_count,
            used=pool.used_count,
            quarantined=pool.quarantined_count,
            cached=published,
            here=pool.used_by_share()[own] if tier is Tier.HOST else pool.used_count,
        )
        for tier in Tier
        for pool, published in zip(state.pools.of(tier), cached[tier], strict=True)
    ]


def _divergence(machine: WorkerMachine) -> DivergenceSnapshot | None:
    seen = machine.first_divergence
    return None if seen is None else DivergenceSnapshot(round=seen.round, sides=seen.sides, operation=seen.operation)


def _copies(direction: str, statistics: DirectionStatistics, pages: int) -> CopySnapshot:
    return CopySnapshot(
        direction=direction,
        transfers=statistics.transfers,
        failed=statistics.failed,
        pages=pages,
        bytes=statistics.copied_bytes,
    )


def _ignored(machine: WorkerMachine, ignored: Mapping[str, int]) -> dict[str, int]:
    total = dict(ignored)
    if machine.rank is not None:
        for held in (machine.rank.ignored, machine.rank.stream.ignored, machine.rank.rounds.ignored):
            for cause, count in held.items():
                total[cause] = total.get(cause, 0) + count
    return total
