"""What a machine wants done next. The shell performs effects in order; the simulation does the same.

None can be part of a cycle, so the garbage collector need not follow them.

Those of every round and decision are final, as such messages are: `type(effect) is SendUp` asks in a fifth of the time
that `isinstance` takes to say no to a struct.
"""

from typing import final

import msgspec

from kvcoord.domain import Rank
from kvcoord.protocol.messages import Activate, Entry, FromCoordinator, FromRank


@final
class Send(msgspec.Struct, frozen=True, gc=False):
    """Coordinator: one message to these peers. The shell encodes it once for all of them."""

    peers: tuple[bytes, ...]
    message: FromCoordinator


@final
class Note(msgspec.Struct, frozen=True, gc=False):
    """For people and recorders only: something that should be seen. Steers nothing."""

    kind: str
    operation: str = ""
    detail: dict[str, object] = {}


@final
class SendUp(msgspec.Struct, frozen=True, gc=False):
    """Rank: one message to the coordinator it is attached to."""

    message: FromRank


class Attach(msgspec.Struct, frozen=True, gc=False):
    """Rank: drop the connection and open one to this coordinator of the list."""

    index: int


@final
class Apply(msgspec.Struct, frozen=True, gc=False):
    """Rank: the next entry of the stream, in sequence."""

    entry: Entry


class Activated(msgspec.Struct, frozen=True, gc=False):
    """Rank: the group works. `fresh`: what was held before is void on every rank."""

    activate: Activate
    fresh: bool


@final
class VerdictReady(msgspec.Struct, frozen=True, gc=False):
    """Rank: the verdict of this round has come and can be taken."""

    round: int


class GroupSuspended(msgspec.Struct, frozen=True, gc=False):
    """Rank: the group does not work for now. `rank` -1: the coordinator is lost."""

    rank: Rank
    cause: str


class JoinFailed(msgspec.Struct, frozen=True, gc=False):
    """Rank: the coordinator refuses; final."""

    reason: str
    field: str
    value: str | int
    other_rank: Rank
    other_value: str | int


class Lost(msgspec.Struct, frozen=True, gc=False):
    """Rank: the group deadline (or the join timeout) has passed; final."""

    cause: str
    waited_s: float


class DivergenceSeen(msgspec.Struct, frozen=True, gc=False):
    """Rank: the coordinator says that the ranks differ."""

    round: int
    sides: list[list[Rank]]
    operation: str


class LogWanted(msgspec.Struct, frozen=True, gc=False):
    """Rank: the coordinator asks for the log of applied events at this round."""

    round: int


CoordinatorEffect = Send | Note
RankEffect = (
    SendUp
    | Attach
    | Apply
    | Activated
    | VerdictReady
    | GroupSuspended
    | JoinFailed
    | Lost
    | DivergenceSeen
    | LogWanted
    | Note
)
