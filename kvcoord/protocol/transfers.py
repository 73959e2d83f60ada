"""Acks of committed operations, on the coordinator: whose copy landed, and when all have.

Counts by name, never by number: a repeated ack cannot stand in for a rank that is absent. The first failed ack, or the
copy deadline, retracts the operation; what comes after an operation's end is ignored and counted.
"""

from collections import OrderedDict

from kvcoord.domain import OperationId, Rank, Reason
from kvcoord.protocol.ballot import ranks_in
from kvcoord.protocol.messages import Ack, Completion


class _Copying:
    __slots__ = ("acked", "deadline", "participants")

    def __init__(self, participants: int, deadline: float) -> None:
        self.participants = participants
        self.acked = 0
        self.deadline = deadline


class TransferTable:
    """Open transfers of one group. A covered operation is first heard of in its first ack."""

    def __init__(self, everyone: int, copy_timeout_s: float, retired_max: int) -> None:
        self._everyone = everyone
        self._copy_timeout_s = copy_timeout_s
        self._retired_max = retired_max
        self._open: OrderedDict[OperationId, _Copying] = OrderedDict()
        self._retired: OrderedDict[OperationId, None] = OrderedDict()
        self.ignored = 0

    def __len__(self) -> int:
        return len(self._open)

    def expect(self, operation: OperationId, participants: int, now: float) -> None:
        """A decision committed it: these ranks will ack, each within the copy timeout."""
        if operation not in self._open and operation not in self._retired:
            self._open[operation] = _Copying(participants, now + self._copy_timeout_s)

    def record(self, rank: Rank, ack: Ack, now: float) -> Completion | None:
        """Counts one ack. Returns the completion when this ack ends the operation."""
        copying = self._open.get(ack.operation)
        if copying is None:
            if ack.operation in self._retired:
                self.ignored += 1
                return None
            participants = (ack.participants & self._everyone) or self._everyone
            copying = self._open[ack.operation] = _Copying(participants, now + self._copy_timeout_s)
        bit = 1 << rank
        if copying.acked & bit or not copying.participants & bit:
            self.ignored += 1
            return None
        if not ack.ok:
            return self._retire(
                ack.operation, Completion(ack.operation, False, 0, ack.reason or Reason.COPY_FAILED, rank)
            )
        copying.acked |= bit
        if copying.acked != copying.participants:
            return None
        return self._retire(ack.operation, Completion(ack.operation, True))

    def expire(self, now: float) -> list[Completion]:
        """Retractions for transfers whose deadline has passed, naming the first rank that did not ack."""
        late = [(operation, copying) for operation, copying in self._open.items() if copying.deadline <= now]
        return [
            self._retire(
                operation,
                Completion(
                    operation, False, 0, Reason.COPY_TIMEOUT, ranks_in(copying.participants & ~copying.acked)[0]
                ),
            )
            for operation, copying in late
        ]

    def retract_all(self, rank: Rank) -> list[Completion]:
        """Retractions of everything open, because `rank` is lost."""
        return [
            self._retire(operation, Completion(operation, False, 0, Reason.RANK_LOST, rank))
            for operation in list(self._open)
        ]

    def deadline(self) -> float | None:
        """When the first open transfer expires. Transfers are opened in order of their deadlines."""
        return next(iter(self._open.values())).deadline if self._open else None

    def clear(self) -> None:
        self._open.clear()
        self._retired.clear()

    def _retire(self, operation: OperationId, completion: Completion) -> Completion:
        del self._open[operation]
        self._retired[operation] = None
        if len(self._retired) > self._retired_max:
            self._retired.popitem(last=False)
        return completion
