"""The words of kvcoord: values that every layer speaks about. No behaviour, no I/O.

Words are DESIGN.md's: an *operation* is one coordinated change, a *vote* is what one rank can do,
a *decision* is COMMIT or ABORT, a *round* is a numbered step of lockstep engines.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

Rank = int
"""One member of a group, 0 <= rank < world size."""

PageKey = bytes
"""A chained fixed hash of a page and all pages before it: equal keys are equal prefixes."""

PAGE_KEY_BYTES: Final = 16

OperationId = str
"""Chosen by the caller so that all ranks name the same change alike, for example `write-through/17/0`."""

OPERATION_ID_LENGTH_MAX: Final = 128

PoolName = str

Shortfall = Mapping[PoolName, int]
"""Pages missing per pool, each > 0. Empty when no pool is short."""

NO_SHORTFALL: Final[Shortfall] = {}


class OperationKind(StrEnum):
    """What an operation changes."""

    WRITE_THROUGH = "write-through"
    WRITE_BACK = "write-back"
    LOAD_BACK = "load-back"
    ALLOCATE = "allocate"
    EVICT_HOST = "evict-host"
    EVICT_DEVICE = "evict-device"
    CUSTOM = "custom"


COPYING_KINDS: Final = frozenset({OperationKind.WRITE_THROUGH, OperationKind.WRITE_BACK, OperationKind.LOAD_BACK})
"""Operations that go on after COMMIT: every participant copies and acks."""


class Agreement(StrEnum):
    """How the votes of one operation combine. See `protocol.ballot`."""

    ALL = "all"
    MIN = "min"
    MAX = "max"
    INTERSECT = "intersect"
    EQUAL = "equal"


class Outcome(StrEnum):
    COMMIT = "commit"
    ABORT = "abort"


class Reason(StrEnum):
    """Why a vote is no, a decision ABORT, or a completion a retraction. Stable: metrics carry it as a label."""

    HOST_FULL = "host_full"
    DEVICE_FULL = "device_full"
    AUXILIARY_FULL = "auxiliary_full"
    NOT_CACHED = "not_cached"
    SOURCE_GONE = "source_gone"
    BUSY = "busy"
    LIMIT = "limit"
    CANCELLED = "cancelled"
    VOTE_TIMEOUT = "vote_timeout"
    NOT_VOTED = "not_voted"
    UNEQUAL = "unequal"
    CONFLICTING_VOTES = "conflicting_votes"
    COPY_FAILED = "copy_failed"
    COPY_TIMEOUT = "copy_timeout"
    RANK_LOST = "rank_lost"
    COORDINATOR_LOST = "coordinator_lost"
    IN_DOUBT = "in_doubt"
    DIVERGED = "diverged"
    SHUTDOWN = "shutdown"
    REFUSED = "refused"


class Path(StrEnum):
    """How an operation came to its decision."""

    COVERED = "covered"
    VOTED = "voted"
    IMMEDIATE = "immediate"


class Tier(StrEnum):
    """Where pages live. Never called L1/L2/L3: the field uses those two ways."""

    DEVICE = "device"
    HOST = "host"


class Layout(StrEnum):
    """The order of the bytes of one pool."""

    LAYER_FIRST = "layer-first"
    """Layer, part, page: adjacent pages of a layer are adjacent bytes. What engines compute in."""

    PAGE_FIRST = "page-first"
    """Page, layer, part: a page is one piece over all of its layers. What storage wants."""


class WritePolicy(StrEnum):
    """When pages are copied from device to host."""

    WRITE_THROUGH = "write-through"
    WRITE_THROUGH_SELECTIVE = "write-through-selective"
    WRITE_BACK = "write-back"


class DivergencePolicy(StrEnum):
    """What follows a difference between the ranks' digests."""

    STOP = "stop"
    RESYNC = "resync"
    WARN = "warn"


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """All participants do it.

    `value` is the agreed value: None for ALL, an int for MIN, MAX and EQUAL, sorted keys for INTERSECT.
    """

    operation: OperationId
    path: Path
    value: int | list[bytes] | None = None

    def __bool__(self) -> bool:
        return True


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Nobody does it. `rank` said no first (or did not speak); -1 when no rank is to blame.

    `shortfall` is pages missing per pool: in rounds the largest over the ranks, else of `rank`.
    """

    operation: OperationId
    path: Path
    reason: Reason
    rank: Rank = -1
    shortfall: dict[PoolName, int] = {}

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        short = ", ".join(f"{pool} short by {count} pages" for pool, count in sorted(self.shortfall.items()))
        blame = f"rank {self.rank}" if self.rank >= 0 else "no rank"
        return f"{self.operation} aborted ({self.reason}, {blame}{', ' + short if short else ''})"
