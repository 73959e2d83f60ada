"""Messages between a rank and its coordinator: structs, no behaviour.

Each is a msgpack array whose first element is the tag. An `epoch` is one 64-bit number: 24 bits of counter above
40 bits of the coordinator's incarnation, so that comparing two epochs compares the counters first and two coordinators
never make the same one.

None can be part of a cycle, so the garbage collector need not follow them (`gc=False`): a coordinator holds thousands.
Final are those that are told apart by `type(message) is Frame`, which takes a fifth of the time that `isinstance` takes
to say no to a struct.
"""

from typing import Final, final

import msgspec

from kvcoord.domain import Agreement, OperationId, OperationKind, Outcome, PoolName, Rank, Reason

PROTOCOL_VERSION: Final = 1

INCARNATION_BITS: Final = 40

EPOCH_NUMBER_MAX: Final = (1 << 24) - 1
"""A counter never comes near it: one epoch a second lasts for half a year. A peer that names a larger one is broken."""

NO_EPOCH: Final = 0

ALL_RANKS: Final = 0
"""As a participants mask: every rank of the group."""

Value = int | list[bytes] | None
"""A vote's or a decision's value; None under ALL."""


def epoch_id(number: int, incarnation: int) -> int:
    """The epoch with this counter, opened by this coordinator life."""
    return (number << INCARNATION_BITS) | incarnation


def epoch_number(epoch: int) -> int:
    """The counter of an epoch: what is shown to people."""
    return epoch >> INCARNATION_BITS


class Vote(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """What one rank can do for one operation. Immutable: a second, different vote is ignored and counted.

    `participants` is a bit mask over ranks, 0 for all. A no carries `reason` and `shortfall` (pages per pool).
    """

    operation: OperationId
    kind: OperationKind
    yes: bool
    agreement: Agreement = Agreement.ALL
    participants: int = ALL_RANKS
    value: Value = None
    reason: Reason | None = None
    shortfall: dict[PoolName, int] = {}


class Ack(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One rank's report that its copy of a committed operation landed (or failed, with the reason).

    `participants` is repeated from the vote, so that a coordinator that never saw the votes waits for the right ranks.
    """

    operation: OperationId
    ok: bool
    reason: Reason | None = None
    participants: int = ALL_RANKS


class Decision(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=30):
    """COMMIT with the agreed value, or ABORT with reason, first rank to blame (-1: none) and shortfall.

    `sequence` numbers the stream densely from 1; inside a verdict it is 0 and the verdict's round orders it.
    """

    operation: OperationId
    outcome: Outcome
    sequence: int = 0
    value: Value = None
    reason: Reason | None = None
    rank: Rank = -1
    shortfall: dict[PoolName, int] = {}


class Completion(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=31):
    """All participants' copies landed (publish), or one failed (retract on all: reason and rank).

    A retraction comes as soon as one copy has failed or is late. Others may still be copying: `drained` says that none
    is any more, so that the pages they read may go. A retraction that was not drained is followed by one that is.
    """

    operation: OperationId
    ok: bool
    drained: bool = True
    sequence: int = 0
    reason: Reason | None = None
    rank: Rank = -1


Entry = Decision | Completion
"""What the stream's sequence numbers."""


@final
class Numbered(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=33):
    """The next entry of the stream, in this epoch."""

    epoch: int
    entry: Entry


@final
class Verdict(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=32):
    """The outcome of one round. `capacity`: per pool the minimum over ranks of the pages free at their frame.

    `absent` names ranks whose frame was missing at the deadline; capacity is then all zero, so nothing is covered.
    """

    epoch: int
    round: int
    decisions: list[Decision]
    completions: list[Completion]
    capacity: list[int]
    absent: list[Rank] = []


@final
class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=10):
    """All that one rank has to say at its step `round`: votes and acks since its last frame, free pages, digest.

    `first_round` is the round with which this rank began its history, said until it has a verdict (-1 from then on):
    the first frame to come need not be the first that was sent.
    """

    epoch: int
    round: int
    votes: list[Vote]
    acks: list[Ack]
    free: list[int]
    digest: int
    first_round: int = -1


class Report(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """What a rank knows when it accepts an epoch. Travels in Accept, never in Hello.

    `history` is the epoch in which its state was begun: ranks with unequal histories cannot go on from what they hold.
    `sequence` is the last stream entry applied, `entries` the recent ones it still has, `in_doubt` the operations it
    voted on without knowing the outcome. `verdicts` are the last ones received and `verdict_next` the round whose
    verdict is needed next (-1: no frame was sent). `retracted` are retractions that are not drained yet. `free` counts
    the free pages of each pool. `lockstep`: this rank's acks travel in frames. `held` counts pages of the host tier
    that may outlive this history.
    """

    history: int
    sequence: int
    entries: list[Entry]
    in_doubt: list[OperationId]
    verdicts: list[Verdict]
    verdict_next: int
    retracted: list[Completion]
    free: list[int]
    lockstep: bool
    held: int = 0


@final
class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=1):
    """A rank asks to join. `attach` counts this life's attachments, so that late ones are told apart."""

    version: int
    group: str
    rank: Rank
    world_size: int
    incarnation: int
    attach: int
    epoch: int
    fingerprint: dict[str, str | int]


@final
class Accept(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=2):
    """A rank takes the proposed epoch and reports what it knows. From here on it takes nothing older."""

    epoch: int
    report: Report


@final
class Heartbeat(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=3):
    """Sent while the group works, also when idle. `sequence` is the last stream entry applied.

    `probe` repeats the number of the coordinator's probe. A rank that has not joined answers a probe under NO_EPOCH.
    """

    epoch: int
    sequence: int
    probe: int = 0


@final
class StreamVote(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=4):
    """A vote that does not wait for a frame.

    `sequence` is the last stream entry applied: an operation decided after it, and forgotten since, is not voted anew.
    """

    epoch: int
    vote: Vote
    sequence: int = 0


@final
class StreamAck(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=5):
    """An ack that does not wait for a frame. `sequence` as in StreamVote."""

    epoch: int
    ack: Ack
    sequence: int = 0


@final
class FetchEntries(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=6):
    """A gap in the stream: send the entries after `sequence` again."""

    epoch: int
    sequence: int


@final
class Leave(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=8):
    """This rank ends in good order."""

    epoch: int


@final
class OperationLog(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=9):
    """A rank's answer to LogRequest: its last applied events, oldest first, as (event, digest after it)."""

    epoch: int
    round: int
    events: list[tuple[str, int]]


@final
class StatusRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=20):
    """Anybody may ask a coordinator for its status."""

    nonce: int


class StatusReply(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=50):
    """`body` is the status as JSON."""

    nonce: int
    body: bytes


class Waiting(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=40):
    """The answer to Hello while ranks are missing, or (`held` names it) while another life of a rank stands in the way.

    Whether that rank still lives is being asked; the Hello is then accepted or refused.
    """

    coordinator: int
    attach: int
    missing: list[Rank]
    held: Rank = -1


@final
class Refused(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=41):
    """The answer to a Hello that can never be accepted: which field, whose values."""

    reason: str
    field: str
    rank: Rank
    value: str | int
    other_rank: Rank
    other_value: str | int


class Prepare(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=42):
    """All ranks have said Hello: the proposed epoch, for the attachment with this number.

    `lost` is the rank that ended the epoch before, -1 for none: a rank may have missed that.
    """

    epoch: int
    attach: int
    lost: Rank = -1


class Activate(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=43):
    """All ranks have accepted: the group works. Carries what any rank knew.

    `history` unequal to a rank's own means: drop what you hold and begin anew. `capacity` is the first agreed free
    count per pool. `round` is the last decided round, -1 for none. `held_least` and `held_most`: the least and the most
    pages that a rank holds from before; with none on some rank there is nothing to be kept.
    """

    epoch: int
    history: int
    entries: list[Entry]
    verdicts: list[Verdict]
    capacity: list[int]
    round: int
    held_least: int = 0
    held_most: int = 0


@final
class Alive(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=44):
    """The answer to a heartbeat; with a `probe` number it asks for one that repeats the number.

    `sequence` is the last entry of the stream, so that a rank notices a lost one also when nothing follows.
    """

    epoch: int
    coordinator: int
    sequence: int
    probe: int = 0


class Suspended(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=45):
    """The epoch is over: `rank` is lost. Open operations of the stream were aborted in sequence before this."""

    epoch: int
    rank: Rank
    cause: str


class Rejoin(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=46):
    """This coordinator does not know the sender (it was restarted, or gave it up): say Hello again."""

    coordinator: int


class LogRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=47):
    """Digests differ at `round`: send the log of applied events."""

    epoch: int
    round: int


class Divergence(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag=48):
    """The ranks differ: those on each side (largest side first) and the first different event, if known.

    `round` -1: not seen in a round, but in what the ranks reported when they joined.
    """

    epoch: int
    round: int
    sides: list[list[Rank]]
    operation: str


FromRank = (
    Hello | Accept | Heartbeat | StreamVote | StreamAck | FetchEntries | Leave | OperationLog | Frame | StatusRequest
)

FromCoordinator = (
    Waiting
    | Refused
    | Prepare
    | Activate
    | Alive
    | Numbered
    | Verdict
    | Suspended
    | Rejoin
    | LogRequest
    | Divergence
    | StatusReply
)
