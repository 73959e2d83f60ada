"""Acks of committed operations, on the coordinator: whose copy landed, and when all have.

Counts by name, never by number: a repeated ack cannot stand in for a rank that is absent. The first failed ack, or the
copy deadline, retracts the operation; its end is told once more when every copy is over. Later acks are ignored and
counted.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvcoord.domain import OperationId, Rank, Reason
from kvcoord.protocol.ballot import participants_of, ranks_in
from kvcoord.protocol.messages import Ack, Completion


class _Copying:
    __slots__ = ("acked", "blame", "deadline", "participants")

    def __init__(self, participants: int, deadline: float, blame: tuple[Reason, Rank] | None) -> None:
        self.participants = participants
        self.acked = 0
        self.deadline = deadline
        self.blame = blame
        """Why it was retracted, once it is: it stays here until every participant's copy is over."""


class TransferTable:
    """Open transfers of one group. A covered operation is first heard of in its first ack.

    Every transfer has the same copy timeout and `now` never goes back, so they are opened in order of their deadlines.
    """

    def __init__(self, everyone: int, copy_timeout_s: float, retired_max: int) -> None:
        self._everyone = everyone
        self._copy_timeout_s = copy_timeout_s
        self._retired_max = retired_max
        self._open: OrderedDict[OperationId, _Copying] = OrderedDict()
        self._retired: OrderedDict[OperationId, None] = OrderedDict()
        self._retracted_before: dict[OperationId, tuple[Reason, Rank]] = {}
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, operation: OperationId) -> bool:
        """Whether it is open here, or ended lately."""
        return operation in self._open or operation in self._retired

    def resume(self, retracted: Iterable[Completion]) -> None:
        """A new epoch: acks are said again. What was retracted before it stays retracted, whatever those acks say."""
        self._open.clear()
        self._retired.clear()
        self._retracted_before = {
            completion.operation: (completion.reason or Reason.COPY_FAILED, completion.rank) for completion in retracted
        }

    def expect(self, operation: OperationId, participants: int, now: float) -> None:
        """A decision committed it: these ranks will ack, each within the copy timeout."""
        if operation not in self._open and operation not in self._retired:
            self._begin(operation, participants, now)

    def record(self, rank: Rank, ack: Ack, now: float) -> Completion | None:
        """Counts one ack. Returns what it brings about: completion, retraction, or the end of a retracted one."""
        bit = 1 << rank
        copying = self._open.get(ack.operation)
        if copying is None:
            participants = participants_of(ack.participants, self._everyone)
            if ack.operation in self._retired or not participants & bit:
                self.ignored += 1
                return None
            copying = self._begin(ack.operation, participants, now)
        if copying.acked & bit or not copying.participants & bit:
            self.ignored += 1
            return None
        copying.acked |= bit
        drained = copying.acked == copying.participants
        first_failure = not ack.ok and copying.blame is None
        if first_failure:
            copying.blame = (ack.reason or Reason.COPY_FAILED, rank)
        if drained:
            self._retire(ack.operation)
        if not (drained or first_failure):
            return None
        if copying.blame is None:
            return Completion(ack.operation, True)
        return Completion(ack.operation, False, drained, 0, *copying.blame)

    def expire(self, now: float) -> list[Completion]:
        """Retractions for transfers whose deadline has passed, naming the first rank that did not ack."""
        retractions = []
        for operation, copying in self._open.items():
            if copying.deadline > now:
                break
            if copying.blame is None:
                copying.blame = (Reason.COPY_TIMEOUT, ranks_in(copying.participants & ~copying.acked)[0])
                retractions.append(Completion(operation, False, False, 0, *copying.blame))
        return retractions

    def retract_all(self, rank: Rank) -> list[Completion]:
        """Retractions of everything open, because `rank` is lost. None is drained: the others may still be copying."""
        retractions = []
        for operation, copying in self._open.items():
            if copying.blame is None:
                copying.blame = (Reason.RANK_LOST, rank)
                retractions.append(Completion(operation, False, False, 0, *copying.blame))
        return retractions

    def deadline(self) -> float | None:
        """When the first transfer that is not retracted expires."""
        return next((copying.deadline for copying in self._open.values() if copying.blame is None), None)

    def _begin(self, operation: OperationId, participants: int, now: float) -> _Copying:
        blame = self._retracted_before.pop(operation, None)
        copying = self._open[operation] = _Copying(participants, now + self._copy_timeout_s, blame)
        return copying

    def _retire(self, operation: OperationId) -> None:
        del self._open[operation]
        self._retired[operation] = None
        if len(self._retired) > self._retired_max:
            self._retired.popitem(last=False)
