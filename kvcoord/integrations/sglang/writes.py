"""Writes to the host: an intent, a reservation that all ranks vote on, and only then a copy.

    intend --frame--> reserved, voted --COMMIT--> in the tree, copying --all ranks acked--> finished
                              |--ABORT(host_full)--> the largest shortfall evicted, once more --ABORT--> dropped

A node is locked from its intent on, so it stays on the device, but others may split it. What is reserved is therefore a
number of slots in each pool. At the commit they go back, and in the same moment SGLang writes, with its own code, what
then covers the span: every rank has the same tree, and slots for all that is missing of it.
"""

from typing import Any

import msgspec

from kvcoord.domain import OperationId, OperationKind, Outcome, Reason
from kvcoord.integrations.sglang.capacity import Capacity, Needs, host
from kvcoord.integrations.sglang.components import Pools, Reserved
from kvcoord.integrations.sglang.copies import Copies
from kvcoord.integrations.sglang.rounds import Rounds
from kvcoord.protocol.messages import Decision

ATTEMPTS_MAX = 2

Tree = Any
"""SGLang's UnifiedRadixCache. Not imported: this module says which of its methods it calls, `contract` checks them."""


class Span(msgspec.Struct, frozen=True):
    """A node as it was at its intent, the tokens it covered, and the lock that keeps it on the device."""

    node: int
    start: int
    end: int
    lock: Any


class Write(msgspec.Struct):
    """One operation: a node with its ancestors that are not on the host either, the ancestors first."""

    spans: list[Span]
    operation: OperationId = ""
    attempt: int = 0
    needs: Needs = {}
    """What was reserved, or tried to, on every rank."""
    reserved: Reserved = {}
    """The slots; empty when this rank could not reserve."""
    room_made: bool = False
    """What the poorest rank lacked was evicted after the first attempt, which the agreed capacity shows later."""


class Writes:
    """The writes of one cache that are not committed yet; `copies` has those that are."""

    def __init__(self, tree: Tree, rounds: Rounds, pools: Pools, capacity: Capacity, copies: Copies) -> None:
        self._tree = tree
        self._rounds = rounds
        self._pools = pools
        self._capacity = capacity
        self._copies = copies
        self.intended: list[Write] = []
        """Not reserved and not voted on yet."""
        self._voted: dict[OperationId, Write] = {}

    def __len__(self) -> int:
        """Writes that are intended or voted on."""
        return len(self.intended) + len(self._voted)

    # --- intents --------------------------------------------------------------------------------------------------

    def intend(self, nodes: list[int]) -> None:
        """SGLang wants these nodes on the host, ancestors first. Those that already are, or are meant to be, are not
        taken again."""
        tree = self._tree
        wanted = [node for node in nodes if self._pools.is_missing(node)]
        wanted = self._not_pending(wanted)
        if not wanted:
            return
        (path,) = tree.tree_core.collect_path_info(wanted[-1:])
        places = {info.node_id: info for info in path}
        spans = [
            Span(node, places[node].path_start, places[node].path_end, tree.inc_lock_ref(node).to_dec_params())
            for node in wanted
        ]
        self._rounds.event(f"intend {' '.join(map(str, wanted))}")
        self.intended.append(Write(spans))

    def _not_pending(self, nodes: list[int]) -> list[int]:
        """Without the nodes that a write already covers, also where that write's node was split since."""
        writes = [*self._voted.values(), *self.intended]
        if not writes or not nodes:
            return nodes
        pending: set[int] = set()
        paths = self._tree.tree_core.collect_path_info([write.spans[-1].node for write in writes])
        for write, path in zip(writes, paths, strict=True):
            start = write.spans[0].start
            pending.update(info.node_id for info in path if info.path_start >= start)
        return [node for node in nodes if node not in pending]

    # --- the step's frame -----------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Tries to reserve for each intent whose ancestors are on the host, and votes on it.

        One whose ancestors are still pending waits for them; one whose ancestors were dropped is dropped as well.
        """
        waiting: list[Write] = []
        for write in self.intended:
            self._refresh(write)
            if not write.spans:
                continue
            parent = self._parent(write)
            if parent is None or self._tree.is_backuped(parent):
                self._vote(write)
            elif self._not_pending([parent]):
                self._drop(write)
            else:
                waiting.append(write)
        self.intended = waiting

    def _refresh(self, write: Write) -> None:
        """Takes the nodes as they are now: some were split since the intent, some have come to the host otherwise."""
        tree, spans = self._tree, []
        paths = tree.tree_core.collect_path_info([span.node for span in write.spans])
        for span, path in zip(write.spans, paths, strict=True):
            for info in path:
                if info.path_start < span.start:
                    continue
                node = info.node_id
                lock = span.lock if node == span.node else tree.inc_lock_ref(node).to_dec_params()
                if self._pools.is_missing(node):
                    spans.append(Span(node, info.path_start, info.path_end, lock))
                else:
                    tree.dec_lock_ref(node, lock)
        write.spans = spans

    def _parent(self, write: Write) -> int | None:
        """The node above the first one, None when that is a root."""
        first = write.spans[0]
        if first.start == 0:
            return None
        (path,) = self._tree.tree_core.collect_path_info([first.node])
        parent = next(info.parent_id for info in path if info.path_start >= first.start)
        return int(parent)

    def _vote(self, write: Write) -> None:
        kind = OperationKind.WRITE_THROUGH
        if not write.operation:
            write.operation = self._rounds.name(kind)
        operation = f"{write.operation}/{write.attempt}"
        write.needs = self._pools.needs([span.node for span in write.spans])
        if not write.room_made:
            self._tree.make_host_room(write.needs)
        self._capacity.take_host(write.needs)
        short = self._capacity.short_here(write.needs)
        write.reserved = self._pools.reserve(write.needs) or {}
        self._voted[operation] = write
        if write.reserved:
            self._rounds.vote_yes(operation, kind)
        else:
            self._rounds.vote_no(operation, kind, Reason.HOST_FULL, {host(pool): n for pool, n in short.items()})

    # --- verdicts -------------------------------------------------------------------------------------------------

    def decided(self, decision: Decision) -> None:
        """One decision of the verdict that is being applied."""
        write = self._voted.pop(decision.operation, None)
        if write is None:
            if decision.outcome is Outcome.COMMIT:
                self._rounds.ack(decision.operation)
            return
        if decision.outcome is Outcome.COMMIT:
            self._commit(decision.operation, write)
            return
        # Not returned to the agreed capacity: a rank that could not reserve gets nothing back. Later frames show it.
        self._release(write)
        last = write.attempt + 1 == ATTEMPTS_MAX
        if not last and self._evict({pool: decision.shortfall.get(host(pool), 0) for pool in write.needs}):
            write.room_made = True
            self._again(write)
        else:
            self._drop(write)

    def _evict(self, short: Needs) -> bool:
        """Frees what the poorest rank lacks of each pool, on every rank. False: that cannot be had."""
        return any(short.values()) and all(self._tree.free_host(pool, slots) >= slots for pool, slots in short.items())

    def _release(self, write: Write) -> None:
        self._pools.release(write.reserved)
        write.reserved = {}

    def _again(self, write: Write) -> None:
        """One more attempt, under a new id, with the next frame."""
        write.attempt += 1
        if write.attempt < ATTEMPTS_MAX:
            self.intended.append(write)
        else:
            self._drop(write)

    def _commit(self, operation: OperationId, write: Write) -> None:
        """Publishes what is missing in the tree and queues the copies.

        If something else brought a part to the host meanwhile, it did so on every rank, and less is left to do. If more
        is missing than was reserved, since a window that was being written reaches further now, all try again.
        """
        self._release(write)
        self._capacity.return_host(write.needs)
        nodes = self._missing(write)
        needs = self._pools.needs(nodes)
        if any(slots > write.needs.get(pool, 0) for pool, slots in needs.items()):
            self._rounds.ack(operation)
            self._again(write)
            return
        self._capacity.take_host(needs)
        for node in nodes:
            self._tree.write_in_given_slots(node, needs)
        if nodes:
            self._copies.begin(operation, nodes)
        else:
            self._rounds.ack(operation)
        self._drop(write)

    def _missing(self, write: Write) -> list[int]:
        """The nodes that cover the spans now, without those of which nothing is left to write."""
        paths = self._tree.tree_core.collect_path_info([span.node for span in write.spans])
        return [
            info.node_id
            for span, path in zip(write.spans, paths, strict=True)
            for info in path
            if span.start <= info.path_start and info.path_end <= span.end
            if info.node_id not in self._tree.ongoing_write_through and self._pools.is_missing(info.node_id)
        ]

    def _drop(self, write: Write) -> None:
        for span in write.spans:
            self._tree.dec_lock_ref(span.node, span.lock)

    def reset(self) -> None:
        """The tree and the host pool are empty. What was voted on is answered and changes nothing."""
        self.intended.clear()
        self._voted.clear()
