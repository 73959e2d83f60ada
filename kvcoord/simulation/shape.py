"""The shape of one simulated group, drawn from its seed: how many ranks, what pools, which policies, which limits."""

import random
from typing import Final

import msgspec

from kvcoord.config.group import EvictionPolicy, GroupConfig, PoolConfig, PoolKind
from kvcoord.config.limits import Limits
from kvcoord.config.process import WorkerConfig
from kvcoord.config.timeouts import Timeouts
from kvcoord.domain import Rank, WritePolicy
from kvcoord.errors import UsageError
from kvcoord.memory.shares import Shares
from kvcoord.protocol.group import GroupLimits

TIMEOUTS = Timeouts(
    heartbeat_interval_s=0.5,
    heartbeat_timeout_s=2.0,
    join_timeout_s=90.0,
    prepare_timeout_s=2.0,
    vote_timeout_s=2.0,
    round_timeout_s=3.0,
    copy_timeout_s=5.0,
    group_deadline_s=90.0,
)
"""Short against the deadline of the group, which must outlast the faults of a run."""


HYBRID_SHARE: Final = 0.3
"""Of the groups in lockstep that do not write back, so many have pools that keep only ends."""


REPLICATED_SHARE: Final = 0.25
"""Of the groups in lockstep whose pools hold whole sequences, so many keep each host page once."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of all groups. None: each seed draws its own."""

    ranks: int = 4
    tp: int | None = None
    pp: int | None = None
    lag: int | None = None
    lockstep: bool | None = None
    coordinators: int | None = None
    faults: int | None = None
    fault_kinds: tuple[str, ...] = ()
    """Only these. Empty: all there are."""
    hybrid: bool | None = None
    """Pools that keep only ends, in lockstep. They are drawn apart: a seed without them has the world it always had."""
    replicated: bool | None = None
    """Ranks that hold the same bytes and keep each host page once, in lockstep. Drawn apart as well."""
    decisions_kept_max: int | None = None
    steps: int = 40
    fault_s: float = 15.0
    """How long faults come, in virtual seconds."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One group. `device_pages` and `host_pages` by rank."""

    group: GroupConfig
    coordinators: int
    device_pages: int
    host_pages: tuple[int, ...]
    limits: Limits
    timeouts: Timeouts = TIMEOUTS
    steps: int = 40
    think_s: float = 0.1
    model: str = ""
    """What engines say computes their pages: named, host pages outlive them."""

    @property
    def ranks(self) -> int:
        return self.group.world_size

    def shares(self, rank: Rank) -> Shares | None:
        """Which rank keeps which host page, as this rank sees it."""
        replicas = self.group.kv_replicas
        return Shares(rank, self.ranks, replicas, self.host_pages[rank]) if replicas > 1 else None

    def worker_config(self, rank: Rank) -> WorkerConfig:
        addresses = [f"ipc:///simulated/coordinator{index}" for index in range(self.coordinators)]
        return WorkerConfig(
            group=msgspec.structs.replace(self.group, pools=[self._pool(pool, rank) for pool in self.group.pools]),
            rank=rank,
            coordinators=addresses,
            device_pages=self.device_pages,
            host_pages=self.host_pages[rank],
            timeouts=self.timeouts,
            limits=self.limits,
        )

    def _pool(self, pool: PoolConfig, rank: Rank) -> PoolConfig:
        """A rank with fewer host pages has as many fewer slots in each pool of ends."""
        if not pool.tail_pages:
            return pool
        fewer = max(self.host_pages) - self.host_pages[rank]
        return msgspec.structs.replace(pool, host_slots=pool.host_slots - fewer)

    def group_limits(self) -> GroupLimits:
        timeouts, limits = self.timeouts, self.limits
        return GroupLimits(
            heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
            prepare_timeout_s=timeouts.prepare_timeout_s,
            vote_timeout_s=timeouts.vote_timeout_s,
            round_timeout_s=timeouts.round_timeout_s,
            copy_timeout_s=timeouts.copy_timeout_s,
            operations_open_max=limits.operations_open_max,
            decisions_kept_max=limits.decisions_kept_max,
            rounds_kept_max=limits.rounds_kept_max,
            report_bytes_max=limits.report_bytes_max,
        )


def draw_shape(options: Options, seed: int) -> Shape:
    """Raises UsageError when tp and pp do not make the number of ranks."""
    rng = random.Random(f"{seed}/shape")
    ranks = options.ranks
    lockstep = rng.random() < 0.7 if options.lockstep is None else options.lockstep
    if (options.hybrid or options.replicated) and options.lockstep is None:
        lockstep = True
    pp = options.pp or (1 if options.tp is None else max(1, ranks // options.tp))
    if options.pp is None and options.tp is None and ranks % 2 == 0 and rng.random() < 0.3:
        pp = 1 if options.replicated and ranks == 2 else 2
    tp = options.tp or max(1, ranks // pp)
    if tp * pp != ranks:
        raise UsageError("ranks", ranks, f"must be tp x pp = {tp} x {pp} = {tp * pp}")
    host = rng.randint(12, 24)
    pools = [PoolConfig(name=name, page_bytes=64, layers=1) for name in rng.choice((("kv",), ("kv",), ("kv", "aux")))]
    lag = options.lag or pp + rng.choice((0, 0, 1))
    policy = rng.choice(list(WritePolicy)) if lockstep else WritePolicy.WRITE_THROUGH
    ends = _draw_ends(options, seed) if lockstep else []
    if ends and options.hybrid and policy is WritePolicy.WRITE_BACK:
        policy = WritePolicy.WRITE_THROUGH
    ends = [] if options.replicated or policy is WritePolicy.WRITE_BACK else ends
    replicas = _draw_replicas(options, seed, tp) if lockstep and not ends else 1
    group = GroupConfig(
        name="sim",
        world_size=ranks,
        tp=tp,
        pp=pp,
        kv_replicas=replicas,
        lag=lag,
        lockstep=lockstep,
        pools=pools + ends,
        write_policy=policy,
        eviction=rng.choice(list(EvictionPolicy)),
    )
    shape = Shape(
        group=group,
        coordinators=options.coordinators or rng.choice((1, 1, 2, 3)),
        device_pages=rng.randint(18, 30),
        host_pages=tuple([-(-(host - rng.choice((0, 0, 0, 1, 3))) // replicas) for _ in range(ranks)]),
        limits=Limits(
            operations_open_max=rng.choice((4, 4096)),
            decisions_kept_max=options.decisions_kept_max or rng.choice((32, 256)),
            rounds_kept_max=rng.choice((8, 64)),
        ),
        steps=options.steps,
        think_s=rng.choice((0.02, 0.1, 0.1, 0.3)),
        model=rng.choice(("", "model", "model")),
    )
    return shape if replicas == 1 else msgspec.structs.replace(shape, host_pages=(max(shape.host_pages),) * ranks)


def _draw_replicas(options: Options, seed: int, tp: int) -> int:
    """How many neighbouring ranks hold the same bytes."""
    rng = random.Random(f"{seed}/replicas")
    counts = [count for count in range(2, tp + 1) if tp % count == 0]
    wanted = rng.random() < REPLICATED_SHARE if options.replicated is None else options.replicated
    return rng.choice(counts) if wanted and counts else 1


def _draw_ends(options: Options, seed: int) -> list[PoolConfig]:
    """Pools that keep only ends, if any: drawn apart, so that whatever else a seed draws stays as it is."""
    rng = random.Random(f"{seed}/ends")
    if not (rng.random() < HYBRID_SHARE if options.hybrid is None else options.hybrid):
        return []
    window = PoolConfig(
        name="window",
        page_bytes=64,
        layers=1,
        kind=PoolKind.WINDOW,
        window_pages=rng.choice((2, 3)),
        device_slots=rng.randint(8, 16),
        host_slots=rng.randint(8, 16),
    )
    state = PoolConfig(
        name="state",
        page_bytes=64,
        layers=1,
        kind=PoolKind.STATE,
        device_slots=rng.randint(4, 8),
        host_slots=rng.randint(5, 9),
    )
    return rng.choice(([window], [state], [window, state], [window, state]))
