"""The stream on a rank: votes that wait for a decision, entries in their sequence, acks that wait for a completion.

Nothing here is lost with a message: votes and acks that stay without an answer are sent again, a gap in the sequence is
fetched again, and what comes twice is ignored and counted.
"""

from collections import OrderedDict, deque
from typing import Final, TypeVar

from kvcoord.domain import OperationId
from kvcoord.protocol.messages import Ack, Completion, Decision, Entry, Vote

T = TypeVar("T")

_ENTRY_BYTES: Final = 96
_KEY_BYTES: Final = 5
_SHORTFALL_BYTES: Final = 16
"""What an entry, a key of its value and a pool of its shortfall take beside their texts."""


class RankStream:
    """What one rank has said and heard outside rounds. Bounded by the operations open, and in what it keeps of the past
    by `entries_kept_max` and `bytes_kept_max`: all of that has to go into one message.
    """

    def __init__(self, entries_kept_max: int, bytes_kept_max: int) -> None:
        self.sequence = 0
        self.ignored: dict[str, int] = {}
        self._kept_max = entries_kept_max
        self._bytes_max = bytes_kept_max
        self._kept: deque[Entry] = deque()
        self._bytes = 0
        self._decided: OrderedDict[OperationId, Decision] = OrderedDict()
        self._votes: OrderedDict[OperationId, tuple[Vote, float]] = OrderedDict()
        self._acks: OrderedDict[OperationId, tuple[Ack, float]] = OrderedDict()
        self._retracted: OrderedDict[OperationId, Completion] = OrderedDict()
        self._completed: OrderedDict[OperationId, None] = OrderedDict()

    # --- votes ----------------------------------------------------------------------------------------------------

    def vote(self, vote: Vote, now: float) -> bool:
        """Remembers a vote until its decision comes. False: there is one already, or the decision is known."""
        operation = vote.operation
        if operation in self._decided or operation in self._votes:
            same = self._votes.get(operation, (vote, now))[0] == vote
            self._count("vote_repeated" if same else "vote_conflicting")
            return False
        self._votes[operation] = (vote, now)
        return True

    def decided(self, operation: OperationId) -> Decision | None:
        """The decision of an operation that ended lately."""
        return self._decided.get(operation)

    def in_doubt(self) -> list[OperationId]:
        """Operations voted on whose outcome is not known."""
        return list(self._votes)

    def undecided(self) -> list[Vote]:
        """The votes for those operations."""
        return [vote for vote, _ in self._votes.values()]

    def overdue_votes(self, now: float, retry_s: float) -> list[Vote]:
        """Votes without an answer for `retry_s`: they are to be sent again."""
        return _overdue(self._votes, now, retry_s)

    # --- entries --------------------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> bool:
        """Takes the next entry of the sequence. False: it is a repetition, or there is a gap before it."""
        if entry.sequence != self.sequence + 1:
            self._count("entry_repeated" if entry.sequence <= self.sequence else "entry_after_gap")
            return False
        self.sequence = entry.sequence
        self._keep(entry)
        if isinstance(entry, Decision):
            self._votes.pop(entry.operation, None)
            _remember(self._decided, entry.operation, entry, self._kept_max)
        else:
            self.completed(entry)
        return True

    def kept(self) -> list[Entry]:
        return list(self._kept)

    def _keep(self, entry: Entry) -> None:
        """As the last of the past. The oldest are forgotten, as far as there is no room for them."""
        kept = self._kept
        kept.append(entry)
        self._bytes += entry_bytes(entry)
        while len(kept) > self._kept_max or self._bytes > self._bytes_max:
            self._bytes -= entry_bytes(kept.popleft())

    # --- acks -----------------------------------------------------------------------------------------------------

    def ack(self, ack: Ack, now: float) -> bool:
        """Remembers an ack until its completion comes. False: the operation has ended already, nothing to say."""
        if ack.operation in self._completed:
            return False
        self._acks[ack.operation] = (ack, now)
        return True

    def completed(self, completion: Completion) -> None:
        """The group's word on an operation, by the stream or a verdict. Once drained, its ack is not sent again."""
        operation = completion.operation
        if not completion.drained:
            self._retracted[operation] = completion
            return
        self._acks.pop(operation, None)
        self._retracted.pop(operation, None)
        _remember(self._completed, operation, None, self._kept_max)

    def retracted(self) -> list[Completion]:
        """Retractions that are not drained yet."""
        return list(self._retracted.values())

    def unfinished(self) -> list[Ack]:
        """Acks whose completion has not come."""
        return [ack for ack, _ in self._acks.values()]

    def overdue_acks(self, now: float, retry_s: float) -> list[Ack]:
        return _overdue(self._acks, now, retry_s)

    # --- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new history: nothing that was is known any more."""
        self.sequence = self._bytes = 0
        for held in (self._kept, self._decided, self._votes, self._acks, self._retracted, self._completed):
            held.clear()

    def _count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1


def entry_bytes(entry: Entry) -> int:
    """At most so long is an entry in a message: what is agreed on may be many page keys."""
    size = _ENTRY_BYTES + len(entry.operation.encode())
    if isinstance(entry, Decision):
        if isinstance(entry.value, list):
            size += sum(map(len, entry.value)) + _KEY_BYTES * len(entry.value)
        size += sum([_SHORTFALL_BYTES + len(pool.encode()) for pool in entry.shortfall])
    return size


def _overdue(sent: OrderedDict[OperationId, tuple[T, float]], now: float, retry_s: float) -> list[T]:
    """Items sent longer than `retry_s` ago; each counts as sent now. Oldest first, so only a prefix is looked at."""
    items = []
    for operation, (item, at) in list(sent.items()):
        if at + retry_s > now:
            break
        sent[operation] = (item, now)
        sent.move_to_end(operation)
        items.append(item)
    return items


def _remember(held: OrderedDict[OperationId, T], operation: OperationId, value: T, kept_max: int) -> None:
    held[operation] = value
    if len(held) > kept_max:
        held.popitem(last=False)
