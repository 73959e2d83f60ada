"""What an agreement benchmark and its rank processes say to each other: one JSON object a line. Structs only."""

from enum import StrEnum

import msgspec


class Subject(StrEnum):
    """What takes part in a block on every rank."""

    MEMBER = "member"
    """The engine itself is a member of the group: `runtime.member`."""

    SIDECAR = "sidecar"
    """The engine speaks to its worker through the blocking client and waits for each answer."""

    SIDECAR_LATER = "sidecar-later"
    """The same, but the answer to a step is read at the next step."""

    GLOO = "gloo"
    """torch.distributed all_reduce(MIN) over gloo."""

    STAR = "star"
    """Raw Unix sockets, no protocol."""

    LEDGER = "ledger"
    """No message at all: what a covered operation costs."""


class Act(StrEnum):
    """What is timed."""

    IMMEDIATE = "immediate"
    STEP = "step"
    COVERED = "covered"


class RankPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What one rank opens. `lags`: one group for each. `gloo_store`, `star_path`: empty for without."""

    rank: int
    ranks: int
    coordinator: str
    lags: list[int]
    sidecar: str = ""
    gloo_store: str = ""
    star_path: str = ""


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """`count` times the same act, on all ranks. Every `number` is used once.

    `period_s` 0: one after another, without a pause. Else act i begins `period_s` x i after `start_s` (the system's
    monotonic clock), on each rank up to `spread_s` later at random, and on one rank in turn up to `late_s` later.
    """

    number: int
    subject: Subject
    act: Act
    count: int
    votes: int = 0
    lag: int = 1
    period_s: float = 0.0
    spread_s: float = 0.0
    late_s: float = 0.0
    start_s: float = 0.0


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The rank has opened everything, together with the others."""


class Timed(msgspec.Struct, frozen=True, tag="timed"):
    """Nanoseconds that the engine's thread was held up by each act of a block."""

    ns: list[int]


ToRank = RankPlan | Block
FromRank = Opened | Timed
