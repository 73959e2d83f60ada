"""What storage brings and takes, agreed: which hits, landed pages and backups are ready, and which waits are over.

SGLang's storage threads put what they have done into queues, in the same order on every rank but at different times.
Each rank acks the entries by id; an entry is taken off its queue, on every rank at the same step, once all have it.
Deadlines work the same way: a wait is over once it is over by every rank's clock.
"""

from collections import deque
from queue import Queue
from typing import Any

from kvcoord.domain import OperationId
from kvcoord.integrations.sglang.rounds import Rounds

Tree = Any
"""SGLang's UnifiedRadixCache."""


class ReadyQueue:
    """One of SGLang's queues. `agreed` counts the leading entries that every rank has."""

    def __init__(self, kind: str, rounds: Rounds) -> None:
        self._kind = kind
        self._rounds = rounds
        self._reported: deque[OperationId] = deque()
        self._complete: set[OperationId] = set()

    def __len__(self) -> int:
        return len(self._reported)

    def report(self, keys: list[str]) -> None:
        """Acks the entries that have come since the last call. `keys` are those of all entries, oldest first."""
        for key in keys[len(self._reported) :]:
            operation = f"{self._kind}/{self._rounds.life}/{key}"
            self._reported.append(operation)
            self._rounds.ack(operation)

    def completed(self, operation: OperationId) -> bool:
        """The group's word on an entry. False: it is none of this queue's."""
        if not operation.startswith(f"{self._kind}/"):
            return False
        if operation.startswith(f"{self._kind}/{self._rounds.life}/"):
            self._complete.add(operation)
        return True

    def take_agreed(self) -> int:
        """How many leading entries are to be taken off the queue now."""
        count = 0
        while self._reported and self._reported[0] in self._complete:
            self._complete.discard(self._reported.popleft())
            count += 1
        return count

    def reset(self) -> None:
        self._reported.clear()
        self._complete.clear()


class Storage:
    """The storage operations of one cache."""

    def __init__(self, tree: Tree, rounds: Rounds) -> None:
        self._tree = tree
        self._rounds = rounds
        self._hits = ReadyQueue("storage-hit", rounds)
        self._landed = ReadyQueue("storage-landed", rounds)
        self._backups = ReadyQueue("storage-backup", rounds)
        self._landed_of: dict[int, int] = {}
        self._landed_keys: dict[int, str] = {}
        self._expiring: dict[OperationId, bool] = {}
        """Waits that may run out, by operation; True once they have on this rank."""
        self._expired: set[OperationId] = set()

    @property
    def _queues(self) -> tuple[ReadyQueue, ReadyQueue, ReadyQueue]:
        return self._hits, self._landed, self._backups

    def report(self) -> None:
        """Acks whatever is ready here since the last step."""
        controller = self._tree.cache_controller
        self._hits.report([str(operation.id) for operation in _peek(controller.prefetch_hit_queue)])
        self._landed.report([self._landed_key(ack) for ack in _peek(controller.ack_prefetch_queue)])
        self._backups.report([str(operation.id) for operation in _peek(controller.ack_backup_queue)])
        self._report_expired()

    def completed(self, operation: OperationId) -> None:
        """The group's word that every rank has acked something."""
        if any(queue.completed(operation) for queue in self._queues):
            return
        if self._expiring.pop(operation, None) is not None:
            self._expired.add(operation)

    def take(self) -> tuple[int, int, int]:
        """Entries to take off the queues of hits, of landed pages and of backups."""
        hits, landed, backups = (queue.take_agreed() for queue in self._queues)
        for ack in _peek(self._tree.cache_controller.ack_prefetch_queue)[:landed]:
            self._landed_keys.pop(id(ack), None)
            if ack.completed_req:
                self._landed_of.pop(ack.operation.id, None)
        return hits, landed, backups

    def _landed_key(self, ack: Any) -> str:
        """Several acks belong to one prefetch; they are numbered in order."""
        key = self._landed_keys.get(id(ack))
        if key is None:
            number = self._landed_of.get(ack.operation.id, 0)
            self._landed_of[ack.operation.id] = number + 1
            key = self._landed_keys[id(ack)] = f"{ack.operation.id}/{number}"
        return key

    # --- deadlines ------------------------------------------------------------------------------------------------

    def expired(self, operation: Any) -> bool:
        """Is this prefetch's wait over on every rank? Asking begins to watch its deadline."""
        name = self._deadline(operation)
        if name in self._expired:
            return True
        self._expiring.setdefault(name, False)
        return False

    def forget(self, operation: Any) -> None:
        """The prefetch is over. Whoever has said that its wait ran out is answered by all, so nothing stays open."""
        name = self._deadline(operation)
        self._expired.discard(name)
        if self._expiring.pop(name, True) is False:
            self._rounds.ack(name)

    def _report_expired(self) -> None:
        if not self._expiring:
            return
        running = {self._deadline(info.operation): info.operation for info in self._tree.ongoing_prefetch.values()}
        for name, told in self._expiring.items():
            if not told and name in running and self._tree._prefetch_deadline_expired(running[name]):
                self._expiring[name] = True
                self._rounds.ack(name)

    def _deadline(self, operation: Any) -> OperationId:
        return f"storage-deadline/{self._rounds.life}/{operation.id}"

    def reset(self) -> None:
        for queue in self._queues:
            queue.reset()
        for held in (self._landed_of, self._landed_keys, self._expiring):
            held.clear()
        self._expired.clear()


def _peek(queue: "Queue[Any]") -> list[Any]:
    """What is in the queue now, oldest first. Only this thread takes from it."""
    with queue.mutex:
        return list(queue.queue)
