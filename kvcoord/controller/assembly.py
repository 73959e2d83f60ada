"""Puts one rank's machine together from its configuration."""

from collections.abc import Callable

from kvcoord.config.group import AgreementMode, EvictionPolicy, GroupConfig, group_fingerprint
from kvcoord.config.process import WorkerConfig
from kvcoord.controller.cache import Cache
from kvcoord.controller.consensus import AgreedConsensus, Consensus, LocalConsensus
from kvcoord.controller.state import CacheState
from kvcoord.controller.streaming import StreamingCache
from kvcoord.controller.tiers import TailPool, TierPools
from kvcoord.controller.worker import WorkerMachine
from kvcoord.index.eviction import EvictionOrder, LfuOrder, LruOrder, PriorityOrder
from kvcoord.index.keys import self_test_digest
from kvcoord.index.tree import RadixTree
from kvcoord.memory.shares import Shares
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine

_ORDERS: dict[EvictionPolicy, Callable[[], EvictionOrder]] = {
    EvictionPolicy.LRU: LruOrder,
    EvictionPolicy.LFU: LfuOrder,
    EvictionPolicy.PRIORITY: PriorityOrder,
}

MakeConsensus = Callable[[TierPools], Consensus]

Watch = Callable[[CacheState], None]
"""Is given the state of each cache that a machine makes, before anything happens in it."""


def fingerprint(group: GroupConfig) -> dict[str, str | int]:
    """What all ranks must have in common to join: settings, and that equal tokens give equal page keys."""
    return {**group_fingerprint(group), "page_key_self_test": self_test_digest()}


def _sizes_in_common(config: WorkerConfig) -> dict[str, str | int]:
    """Limits at which every rank has to stop together: each finds for itself that one is reached.

    So it is with host slots that are numbered through all ranks.
    """
    limits = config.limits
    sizes: dict[str, str | int] = {"host_pages": config.host_pages} if config.group.kv_replicas > 1 else {}
    return sizes | {
        "limits.operations_open_max": limits.operations_open_max,
        "limits.pages_per_operation_max": limits.pages_per_operation_max,
        "limits.message_bytes_max": limits.message_bytes_max,
    }


def _tail_pools(config: WorkerConfig) -> list[TailPool]:
    """The pools that keep only the end of a sequence, in the group's order."""
    slots = zip(config.group.pools, config.device_slots, config.host_slots, strict=True)
    return [TailPool(pool.name, pool.tail_pages, device, host) for pool, device, host in slots if pool.tail_pages]


def _unwatched(_: CacheState) -> None:
    """Nobody looks on."""


def make_worker(config: WorkerConfig, incarnation: int, watch: Watch = _unwatched) -> WorkerMachine:
    """The machine of a rank that agrees through a coordinator, or (agreement none) only reports to it."""
    group = config.group
    holder: list[WorkerMachine] = []
    identity = Identity(
        group=group.name,
        rank=config.rank,
        world_size=group.world_size,
        incarnation=incarnation,
        fingerprint=fingerprint(group) | _sizes_in_common(config),
    )
    timeouts = config.timeouts
    limits = RankLimits(
        heartbeat_interval_s=timeouts.heartbeat_interval_s,
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        join_timeout_s=timeouts.join_timeout_s,
        gather_timeout_s=timeouts.gather_timeout_s,
        group_deadline_s=timeouts.group_deadline_s,
        decisions_kept_max=config.limits.decisions_kept_max,
        report_bytes_max=config.limits.report_bytes_max,
    )
    rank = RankMachine(
        identity,
        len(config.coordinators),
        group.lag,
        limits,
        lambda: holder[0].cache.state.pools.free_counts(),
        lockstep=group.lockstep,
        held=lambda: holder[0].host.held(holder[0].cache.state),
    )

    def consensus(pools: TierPools) -> Consensus:
        if group.agreement is AgreementMode.NONE:
            return LocalConsensus(pools)
        return AgreedConsensus(Ledger(2 * len(group.pools)), rank, len(group.pools), pools.page_pools)

    machine = make_machine(config, rank, consensus, watch)
    holder.append(machine)
    return machine


def make_machine(
    config: WorkerConfig, rank: RankMachine | None, make_consensus: MakeConsensus, watch: Watch = _unwatched
) -> WorkerMachine:
    """A machine with any way to agree."""
    group = config.group
    names = [pool.name for pool in group.pools if not pool.tail_pages]
    replicas = group.kv_replicas
    shares = Shares(config.rank, group.world_size, replicas, config.host_pages) if replicas > 1 else None
    tails = _tail_pools(config)

    def make_cache() -> tuple[Cache | StreamingCache, Consensus]:
        pools = TierPools(names, config.device_pages, config.host_pages, tails, replicas)
        consensus = make_consensus(pools)
        state = CacheState(
            rank=config.rank,
            tree=RadixTree(_ORDERS[group.eviction](), names, names, pools.windows),
            pools=pools,
            consensus=consensus,
            digest=Digest(config.limits.decisions_kept_max),
            policy=group.write_policy,
            write_hits_min=group.write_hits_min,
            lockstep=group.lockstep,
            operations_max=config.limits.operations_open_max,
            immediate_allowed=group.pp == 1 or not group.lockstep,
            shares=shares,
        )
        watch(state)
        if not group.lockstep:
            return StreamingCache(state, config.limits.decisions_kept_max), consensus
        return Cache(state), consensus

    copy_timeout_s = config.timeouts.copy_timeout_s
    return WorkerMachine(make_cache, rank, group.name, group.divergence, config.limits, copy_timeout_s)
