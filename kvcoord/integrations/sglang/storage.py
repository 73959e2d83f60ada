"""What storage brings and takes, agreed: which hits, landed pages and backups are ready, and which waits are over.

SGLang's storage threads put what they have done into queues, in the same order on every rank but at different times.
Each rank acks the entries by id; an entry is taken off its queue, on every rank at the same step, once all have it.
Deadlines work the same way: a wait is over once it is over by every rank's clock.
"""

from collections.abc import Callable
from queue import Queue
from typing import Any

from kvcoord.domain import OperationId
from kvcoord.integrations.sglang.rounds import Rounds

Tree = Any
"""SGLang's UnifiedRadixCache."""


class ReadyQueue:
    """One of SGLang's queues. `take_agreed` counts the leading entries that every rank has.

    `key` names an entry as every rank names it; it is asked once for each, in order.
    """

    def __init__(self, kind: str, rounds: Rounds, key: Callable[[Any], str]) -> None:
        self._kind = kind
        self._rounds = rounds
        self._key = key
        self._reported: dict[OperationId, bool] = {}
        """Entries that are still on the queue, oldest first; True once every rank has them."""

    def __len__(self) -> int:
        return len(self._reported)

    def report(self, queue: "Queue[Any]") -> None:
        """Acks the entries that have come since the last call."""
        if len(queue.queue) == len(self._reported):
            return
        for entry in peek(queue)[len(self._reported) :]:
            operation = self._name(self._key(entry))
            self._reported[operation] = False
            self._rounds.ack(operation)

    def answer(self, key: str) -> None:
        """Acks an entry that will not be taken any more, unless it was reported."""
        operation = self._name(key)
        if operation not in self._reported:
            self._rounds.ack(operation)

    def completed(self, operation: OperationId) -> bool:
        """The group's word on an entry. False: it is none of those that are waited for."""
        if operation not in self._reported:
            return False
        self._reported[operation] = True
        return True

    def take_agreed(self) -> int:
        """How many leading entries are to be taken off the queue now."""
        count = 0
        while self._reported:
            operation = next(iter(self._reported))
            if not self._reported[operation]:
                break
            del self._reported[operation]
            count += 1
        return count

    def reset(self) -> None:
        self._reported.clear()

    def _name(self, key: str) -> OperationId:
        return f"{self._kind}/{self._rounds.life}/{key}"


class Storage:
    """The storage operations of one cache."""

    def __init__(self, tree: Tree, rounds: Rounds) -> None:
        self._tree = tree
        self._rounds = rounds
        self._hits = ReadyQueue("storage-hit", rounds, _id)
        self._landed = ReadyQueue("storage-landed", rounds, self._landed_key)
        self._backups = ReadyQueue("storage-backup", rounds, _id)
        self._landed_of: dict[int, int] = {}
        self._fetching: dict[int, Any] = {}
        """Prefetches that storage threads still work for, those of aborted requests too, by SGLang's number."""
        self._expiring: dict[OperationId, bool] = {}
        """Waits that may run out, by operation; True once they have on this rank."""
        self._expired: set[OperationId] = set()

    @property
    def _queues(self) -> tuple[ReadyQueue, ReadyQueue, ReadyQueue]:
        return self._hits, self._landed, self._backups

    def __len__(self) -> int:
        """Prefetches that storage threads still work for, the same on every rank."""
        return len(self._fetching)

    def report(self) -> None:
        """Acks whatever is ready here since the last step."""
        controller = self._tree.cache_controller
        self._hits.report(controller.prefetch_hit_queue)
        self._landed.report(controller.ack_prefetch_queue)
        self._backups.report(controller.ack_backup_queue)
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
        return hits, landed, backups

    def _landed_key(self, ack: Any) -> str:
        """Several acks belong to one prefetch; they are numbered in order."""
        operation = ack.operation.id
        number = self._landed_of.pop(operation, 0)
        if not ack.completed_req:
            self._landed_of[operation] = number + 1
        return f"{operation}/{number}"

    # --- prefetches under way -------------------------------------------------------------------------------------

    def begin(self, operation: Any) -> None:
        """A prefetch was given to the storage threads."""
        self._fetching[operation.id] = operation

    def sweep(self, hits: list[Any], landed: list[Any]) -> None:
        """These entries were taken off their queues: which prefetches do the threads not work for any more?"""
        for operation in hits:
            if operation.host_indices is None:
                self._fetching.pop(operation.id, None)
        for ack in landed:
            if ack.completed_req:
                self._fetching.pop(ack.operation.id, None)

    def is_settled(self) -> bool:
        """Have this rank's threads done all they can for every prefetch? Until then other ranks' may wait for them."""
        if not self._fetching:
            return True
        controller = self._tree.cache_controller
        done = {operation.id for operation in peek(controller.prefetch_hit_queue)}
        done.update(ack.operation.id for ack in peek(controller.ack_prefetch_queue) if ack.completed_req)
        return done.issuperset(self._fetching)

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

    # --- the end of an attachment, or of a life -------------------------------------------------------------------

    def answer(self) -> None:
        """The threads are about to stop: whatever is open is acked, so that no rank waits for it."""
        if not self._tree.enable_storage:
            return
        self.report()
        for number in self._tree.ongoing_backup:
            self._backups.answer(str(number))
        for name, told in self._expiring.items():
            if not told:
                self._rounds.ack(name)

    def reset(self) -> None:
        """What was open is forgotten."""
        for queue in self._queues:
            queue.reset()
        for held in (self._landed_of, self._fetching, self._expiring):
            held.clear()
        self._expired.clear()


def peek(queue: "Queue[Any]") -> list[Any]:
    """What is in the queue now, oldest first. Only this thread takes from it."""
    with queue.mutex:
        return list(queue.queue)


def _id(operation: Any) -> str:
    return str(operation.id)
