"""Which copies are over: told to the group by operation, and taken from the group's word.

SGLang keeps its running copies in two lists, oldest first, and takes from the front as many as a collective says. Here
each rank acks the operations whose copies have ended on it, and takes from the front what has ended on all ranks.
"""

from typing import Any

from kvcoord.domain import OperationId
from kvcoord.integrations.sglang.rounds import Rounds

AckList = list[Any]
"""SGLang's HiCacheAck objects: an event that can be asked, and the nodes of the operations that were merged into it."""


class Copies:
    """The copies of one direction. `finished` counts how many leading entries of SGLang's list are over everywhere."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._operations: dict[int, OperationId] = {}
        """By the node that SGLang names the copy with."""
        self._nodes: dict[OperationId, list[int]] = {}
        self._left: dict[OperationId, set[int]] = {}
        """Nodes of an operation whose copies are not over on this rank."""
        self._over: set[int] = set()
        """Nodes whose copies are over everywhere and not yet taken."""
        self._reported = 0

    def __len__(self) -> int:
        """Operations that are not over everywhere."""
        return len(self._nodes)

    def begin(self, operation: OperationId, nodes: list[int]) -> None:
        """All copies of this operation are queued."""
        for node in nodes:
            self._operations[node] = operation
        self._nodes[operation] = nodes
        self._left[operation] = set(nodes)

    def report(self, running: AckList) -> None:
        """Acks every operation whose last copy has ended here since the last call."""
        if not running:
            self._reported = 0
            return
        self._reported = min(self._reported, len(running))
        while self._reported < len(running) and running[self._reported].finish_event.query():
            for node in running[self._reported].node_ids:
                operation = self._operations.get(node)
                if operation is None:
                    continue
                left = self._left[operation]
                left.discard(node)
                if not left:
                    self._rounds.ack(operation)
            self._reported += 1

    def completed(self, operation: OperationId) -> bool:
        """The group's word that all copies of an operation are over. False: it is not one of these."""
        nodes = self._nodes.pop(operation, None)
        if nodes is None:
            return False
        del self._left[operation]
        for node in nodes:
            del self._operations[node]
        self._over.update(nodes)
        return True

    def finished(self, running: AckList) -> int:
        """Leading entries of which every copy is over everywhere. The caller takes them off the list."""
        count = 0
        for entry in running:
            if not self._over.issuperset(entry.node_ids):
                break
            count += 1
        for entry in running[:count]:
            self._over.difference_update(entry.node_ids)
        self._reported -= count
        return count

    def reset(self) -> None:
        """The copies are abandoned, on every rank: whatever was open is acked, so that nobody waits for it."""
        for operation, left in self._left.items():
            if left:
                self._rounds.ack(operation)
        self._operations.clear()
        self._nodes.clear()
        self._left.clear()
        self._over.clear()
        self._reported = 0
