"""What one replay does, worked out from its options before anything is started: the group, pool sizes, who plays what.

It starts nothing. Pool sizes that nobody has named are taken from the trace.
"""

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config.group import AgreementMode, EvictionPolicy, GroupConfig, PoolConfig, PoolKind
from kvcoord.config.process import CoordinatorConfig, CopyFaultsConfig, LogLevel, WorkerConfig
from kvcoord.config.timeouts import Timeouts
from kvcoord.domain import DivergencePolicy, WritePolicy
from kvcoord.errors import UsageError
from kvcoord.load.dialogue import DriverPlan
from kvcoord.load.trace import DEMO, Request, read

POOL: Final = "kv"

WINDOW_PAGES: Final = 4
"""What a hybrid replay keeps of the end of a sequence, beside one state."""

ENDS_SHARE: Final = 32
"""Pages for each sequence whose end fits, in a hybrid replay."""

PAGE_TOKENS: Final = 512
"""Tokens of one page of a trace."""

COORDINATOR_SOCKETS: Final = ("coordinator.sock", "standby.sock")

TIMEOUTS: Final = Timeouts(heartbeat_timeout_s=15.0, round_timeout_s=60.0, copy_timeout_s=60.0, group_deadline_s=90.0)
"""Longer than the defaults: a replay may run many more processes than the machine has cores."""

CALL_TIMEOUT_S: Final = 120.0
"""How long a driver waits for an answer of its worker: longer than any of the above."""


class Agreeing(StrEnum):
    """How the ranks of a replay agree: through kvcoord, by a blocking collective for comparison, or not at all."""

    KVCOORD = "kvcoord"
    GLOO = "gloo"
    NONE = "none"


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for. Zeros and empty lists mean "derived".

    `device_pages` and `host_pages` hold one number for all ranks, or one for each. `speed_up` 0 plays as fast as
    possible, else requests start at their timestamp / `speed_up`. `slow_copy_s` and `jitter_s` are keyed by rank.

    `hybrid` adds a sliding window and a state, in pools smaller than that of the pages. `replicated`: the ranks of a
    stage hold the same bytes and keep each host page once; `host_pages` are then those of all of them together.

    `standby` adds a second coordinator to the list, `restart` starts a coordinator again that has died, and
    `kill_coordinator` kills the first one with SIGKILL after so many requests (0: never).
    """

    trace: str = str(DEMO)
    requests_max: int | None = None
    ranks: int = 0
    tp: int = 0
    pp: int = 1
    lag: int = 0
    unlimited: bool = False
    device_pages: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()
    page_bytes: int = 256
    layers: int = 4
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: EvictionPolicy = EvictionPolicy.LRU
    agreement: Agreeing = Agreeing.KVCOORD
    settle: bool = False
    speed_up: float = 0.0
    slow_copy_s: dict[int, float] = {}
    jitter_s: dict[int, float] = {}
    hybrid: bool = False
    replicated: bool = False
    standby: bool = False
    restart: bool = False
    kill_coordinator: int = 0


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A replay that can be started. Page counts are per rank, in its own memory."""

    options: ReplayOptions
    group: GroupConfig
    request_count: int
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    timeouts: Timeouts = TIMEOUTS

    @property
    def coordinator_count(self) -> int:
        if self.options.agreement is Agreeing.GLOO:
            return 0
        return 2 if self.options.standby else 1

    def coordinator(self, index: int, directory: Path) -> CoordinatorConfig:
        """The configuration of one coordinator of the list, with its socket in `directory`."""
        return CoordinatorConfig(
            bind=[coordinator_address(directory, index)],
            http=None,
            recorder_dir=str(directory),
            timeouts=self.timeouts,
            log_level=LogLevel.ERROR,
        )

    def worker(self, rank: int, directory: Path) -> WorkerConfig:
        """The configuration of one rank's worker, with its sockets in `directory`."""
        return WorkerConfig(
            group=_sized(self.group, self.device_pages[rank], self.host_pages[rank]),
            rank=rank,
            listen=worker_address(directory, rank),
            coordinators=[coordinator_address(directory, index) for index in range(max(self.coordinator_count, 1))],
            device_pages=self.device_pages[rank],
            host_pages=self.host_pages[rank],
            http=None,
            recorder_dir=str(directory),
            timeouts=self.timeouts,
            copy_faults=CopyFaultsConfig(delay_s=self.options.slow_copy_s.get(rank, 0.0)),
            log_level=LogLevel.ERROR,
        )

    def driver(self, rank: int, directory: Path, upstream_fd: int, downstream_fd: int) -> DriverPlan:
        """What one rank's engine plays. The descriptors join it to the stages before and after, -1 for none."""
        options = self.options
        return DriverPlan(
            rank=rank,
            bytes_of=rank - rank % self.group.kv_replicas,
            address=worker_address(directory, rank),
            trace=options.trace,
            requests_max=options.requests_max,
            lag=self.group.lag,
            pages_that_fit=min(self.device_pages),
            settle=options.settle,
            full_pages_only=options.hybrid,
            speed_up=options.speed_up,
            jitter_s=options.jitter_s.get(rank, 0.0),
            alone=options.agreement is Agreeing.NONE,
            call_timeout_s=CALL_TIMEOUT_S,
            upstream_fd=upstream_fd,
            downstream_fd=downstream_fd,
            progress=rank == 0,
        )

    def stage_links(self) -> list[tuple[int, int]]:
        """Pairs of ranks (from, to) whose engines hand activations on. Rank = stage x tp + index."""
        tp, world = self.group.tp, self.group.world_size
        return [(rank, rank + tp) for rank in range(world - tp)]


def coordinator_address(directory: Path, index: int = 0) -> str:
    return f"unix://{directory}/{COORDINATOR_SOCKETS[index]}"


def worker_address(directory: Path, rank: int) -> str:
    return f"ipc://{directory}/rank{rank}.sock"


def plan_replay(options: ReplayOptions) -> ReplayPlan:
    """Checks the options against each other and the trace. Raises UsageError or ConfigError, naming the option."""
    requests = read(options.trace, options.requests_max)
    if not requests:
        raise UsageError("trace", options.trace, "holds no request to play")
    group = _group(options)
    _check(options, group)
    device, host = _pool_sizes(options, requests)
    host = tuple([-(-pages // group.kv_replicas) for pages in host])
    return ReplayPlan(
        options=options,
        group=group,
        request_count=len(requests),
        device_pages=_per_rank("device-pages", device, group.world_size),
        host_pages=_per_rank("host-pages", host, group.world_size),
    )


def _group(options: ReplayOptions) -> GroupConfig:
    alone = options.agreement is Agreeing.NONE
    return GroupConfig(
        name="replay",
        world_size=options.ranks,
        tp=options.tp,
        pp=options.pp,
        kv_replicas=_replicas(options),
        lag=options.lag,
        page_tokens=PAGE_TOKENS,
        pools=_pools(options),
        write_policy=options.policy,
        eviction=options.eviction,
        divergence=DivergencePolicy.WARN if alone else DivergencePolicy.STOP,
        agreement=AgreementMode.NONE if alone else AgreementMode.KVCOORD,
    )


def _replicas(options: ReplayOptions) -> int:
    """Ranks that hold the same bytes: those of a stage, or each has its own."""
    if not options.replicated:
        return 1
    ranks = (options.tp or options.ranks // options.pp) if options.tp or options.ranks else 1
    if ranks < 2:
        raise UsageError(
            "replicated", True, "needs more than one rank in a stage: with one nobody holds the same bytes"
        )
    return ranks


def _pools(options: ReplayOptions) -> list[PoolConfig]:
    kv = PoolConfig(name=POOL, page_bytes=options.page_bytes, layers=options.layers, dtype="uint8")
    if not options.hybrid:
        return [kv]
    window = msgspec.structs.replace(kv, name="window", kind=PoolKind.WINDOW, window_pages=WINDOW_PAGES)
    return [kv, window, msgspec.structs.replace(kv, name="state", kind=PoolKind.STATE)]


def _sized(group: GroupConfig, device_pages: int, host_pages: int) -> GroupConfig:
    """The pools of one rank: what keeps only ends has room for the ends of fewer sequences than there are pages."""
    pools = [
        pool
        if pool.kind is PoolKind.PAGES
        else msgspec.structs.replace(
            pool,
            device_slots=pool.tail_pages * (device_pages // ENDS_SHARE + 2),
            host_slots=pool.tail_pages * (host_pages // ENDS_SHARE + 2),
        )
        for pool in group.pools
    ]
    return msgspec.structs.replace(group, pools=pools)


def _check(options: ReplayOptions, group: GroupConfig) -> None:
    if options.speed_up < 0:
        raise UsageError("speed-up", options.speed_up, "give a factor > 0")
    for field, by_rank in (("slow-copy", options.slow_copy_s), ("jitter", options.jitter_s)):
        for rank, seconds in sorted(by_rank.items()):
            if not 0 <= rank < group.world_size:
                raise UsageError(field, rank, f"name one of the ranks 0 to {group.world_size - 1}")
            if not 0 <= seconds <= 10:
                raise UsageError(field, seconds, "give from 0 to 10 seconds")
    if options.kill_coordinator and not (options.standby or options.restart):
        fix = "nobody would take over: add --standby or --restart"
        raise UsageError("kill-coordinator", options.kill_coordinator, fix)
    if options.replicated and len(set(options.host_pages)) > 1:
        fix = "ranks that keep host pages for each other have equally many: give one number, of all of them together"
        raise UsageError("host-pages", ",".join(map(str, options.host_pages)), fix)
    if options.agreement is Agreeing.GLOO:
        if options.replicated:
            raise UsageError("agreement", "gloo", "has no coordinator, who tells which rank keeps what: use kvcoord")
        if options.standby or options.restart:
            raise UsageError("agreement", "gloo", "has no coordinator: leave out --standby and --restart")
        if group.pp > 1:
            fix = "a collective inside the step waits in a circle across pipeline stages; play it with pp 1"
            raise UsageError("agreement", "gloo", fix)
        if find_spec("torch") is None:
            raise UsageError("agreement", "gloo", "needs torch, which is not installed: pip install 'kvcoord[worker]'")


def _pool_sizes(options: ReplayOptions, requests: list[Request]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(device, host) pages as the user or the trace says.

    The sizes for whoever names none let everything happen that can: hits on both tiers, load-backs, evictions.
    """
    if options.unlimited and (options.device_pages or options.host_pages):
        raise UsageError("pools", "unlimited", "name no --device-pages or --host-pages beside it")
    if options.device_pages and options.host_pages:
        return options.device_pages, options.host_pages
    distinct = len({key for request in requests for key in request.keys})
    if options.unlimited:
        return (distinct,), (distinct,)
    longest = max(len(request.hash_ids) for request in requests)
    device = options.device_pages or (max(2 * longest, distinct // 16),)
    return device, options.host_pages or (max(4 * longest, distinct // 4),)


def _per_rank(field: str, pages: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    if min(pages) < 1:
        raise UsageError(field, min(pages), "a pool holds at least one page")
    if len(pages) not in (1, ranks):
        raise UsageError(field, ",".join(map(str, pages)), f"give one number, or one for each of the {ranks} ranks")
    return pages if len(pages) == ranks else pages * ranks
