"""What a process looks like at one moment: the one source of `/metrics`, `/status` and `kvcoord status --json`.

Machines keep plain counters; whoever owns them fills these structs when somebody asks, never on the hot path.
Counters count from the start of this process life and only grow. All times are seconds, all sizes pages unless named
otherwise. This module computes nothing and knows no machine.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvcoord.domain import OperationKind, Outcome, Path, Rank, Reason, Tier
from kvcoord.durations import Durations

STEP_BUCKETS_S: Final = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.1)
"""Engine-thread time of one step: a covered operation takes microseconds, a gloo all_reduce some 0.15 to 3 ms."""

COPY_BUCKETS_S: Final = (1e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0)
"""From one page to the default copy timeout."""


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """`counts[i]` values were <= `bounds_s[i]` and above the bound before; the last count has no upper bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


def histogram_of(durations: Durations) -> HistogramSnapshot:
    return HistogramSnapshot(durations.bounds_s, tuple(durations.counts), durations.sum_s)


class DecisionCount(msgspec.Struct, frozen=True, kw_only=True):
    """Operations decided alike. `operation` is None where the kind is unknown, `reason` None for a commit."""

    operation: OperationKind | None = None
    path: Path
    outcome: Outcome
    reason: Reason | None = None
    count: int


DecisionKey = tuple[OperationKind | None, Path, Outcome, Reason | None]


def decision_counts(counters: Mapping[DecisionKey, int]) -> list[DecisionCount]:
    """Turn counters keyed by (kind, path, outcome, reason) into the snapshot's list, in an order of its own."""
    ordered = sorted(counters.items(), key=lambda item: tuple(part or "" for part in item[0]))
    return [
        DecisionCount(operation=operation, path=path, outcome=outcome, reason=reason, count=count)
        for (operation, path, outcome, reason), count in ordered
    ]


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as its coordinator sees it. `last_heard_s` is the age of its last message, None if never heard."""

    rank: Rank
    state: str
    last_heard_s: float | None = None
    round: int = 0
    incarnation: str = ""


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One group. `reason` says why it is not `ready`. `free_pages` is the capacity per pool in the last verdict.

    `retractions` is keyed by reason. `round` is the last closed round, `rounds_closed` counts those closed here.
    """

    name: str
    state: str
    ready: bool = False
    reason: str = ""
    epoch: int = 0
    world_size: int
    ranks: list[RankSnapshot] = []
    round: int = 0
    rounds_closed: int = 0
    round_close: HistogramSnapshot | None = None
    operations_open: int = 0
    free_pages: dict[str, int] = {}
    decisions: list[DecisionCount] = []
    retractions: dict[str, int] = {}
    divergences: int = 0
    ranks_lost: int = 0


class ProcessSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What every process reports. `ready_reason` is empty when ready.

    `received` is keyed by message name, `ignored` by cause (stale_epoch, duplicate, malformed, oversized, unknown,
    version ...): both sets of keys are fixed by the program, never taken from a peer.
    """

    version: str
    incarnation: str
    uptime_s: float
    ready: bool
    ready_reason: str = ""
    received: dict[str, int] = {}
    ignored: dict[str, int] = {}
    events_recorded: int = 0
    events_dropped: int = 0


class CoordinatorSnapshot(ProcessSnapshot, frozen=True, kw_only=True, tag_field="process", tag="coordinator"):
    """A coordinator. `joins_refused` is keyed by the refusal's reason."""

    groups: list[GroupSnapshot] = []
    joins_refused: dict[str, int] = {}


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one pool on one rank: free + reserved + used + quarantined = capacity. `cached` of the used ones are
    published, `here` of them are in this rank's own memory: all, unless ranks keep host pages for each other."""

    name: str
    tier: Tier
    capacity: int
    free: int
    reserved: int = 0
    used: int = 0
    quarantined: int = 0
    cached: int = 0
    here: int = 0


class CopySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Copies in one direction, such as `device_to_host`, that have ended. `failed` ones are not in `pages`, `bytes`."""

    direction: str
    transfers: int = 0
    failed: int = 0
    pages: int = 0
    bytes: int = 0
    duration: HistogramSnapshot | None = None


class DivergenceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks first differed: the round, the ranks on each side, the first operation that differs (or empty)."""

    round: int
    sides: list[list[Rank]]
    operation: str


class WorkerSnapshot(ProcessSnapshot, frozen=True, kw_only=True, tag_field="process", tag="worker"):
    """The rank-side process of one rank.

    `pages_cached`, `pages_hit` and `pages_evicted` are keyed by tier. `coordinator` is the address in use, empty
    when none; `coordinator_last_heard_s` the age of its last message, None if never heard. Ranks that have taken the
    same decisions have equal `digest`, of decisions, and `index_digest`, of published pages.
    """

    group: str
    rank: Rank
    state: str
    epoch: int = 0
    round: int = 0
    coordinator: str = ""
    coordinator_last_heard_s: float | None = None
    heartbeats_sent: int = 0
    operations_open: int = 0
    pools: list[PoolSnapshot] = []
    pages_cached: dict[str, int] = {}
    pages_hit: dict[str, int] = {}
    pages_evicted: dict[str, int] = {}
    pages_requested: int = 0
    decisions: list[DecisionCount] = []
    retractions: dict[str, int] = {}
    divergences: int = 0
    first_divergence: DivergenceSnapshot | None = None
    copies: list[CopySnapshot] = []
    step: HistogramSnapshot | None = None
    leases_open: int = 0
    digest: str = ""
    index_digest: str = ""


Snapshot = CoordinatorSnapshot | WorkerSnapshot
"""The body of `/status`; its field `process` says which of the two it is."""
