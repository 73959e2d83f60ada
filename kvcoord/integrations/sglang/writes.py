"""Writes to the host: an intent, a reservation that all ranks vote on, and only then a copy.

    intend --frame--> reserved, voted --COMMIT--> in the tree, copying --all ranks acked--> finished
                              |--ABORT(host_full)--> the largest shortfall evicted, once more --ABORT--> dropped

A node is locked from its intent on, so it stays on the device, but others may split it: what is committed are the nodes
that then cover the span that was reserved.
"""

from typing import Any

import msgspec

from kvcoord.domain import OperationId, OperationKind, Outcome, Reason
from kvcoord.integrations.sglang.capacity import HOST, Capacity
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
    reserved: list[Any] = []
    """SGLang's queued operation of each span, in the same order; empty when this rank could not reserve."""

    @property
    def slots(self) -> int:
        return sum(span.end - span.start for span in self.spans)


class Writes:
    """The writes of one cache that are not committed yet; `copies` has those that are."""

    def __init__(self, tree: Tree, rounds: Rounds, capacity: Capacity, copies: Copies) -> None:
        self._tree = tree
        self._rounds = rounds
        self._capacity = capacity
        self._copies = copies
        self._intended: list[Write] = []
        self._voted: dict[OperationId, Write] = {}

    def __len__(self) -> int:
        """Writes that are intended or voted on."""
        return len(self._intended) + len(self._voted)

    # --- intents --------------------------------------------------------------------------------------------------

    def intend(self, nodes: list[int]) -> None:
        """SGLang wants these nodes on the host, ancestors first. Those that already are, or are meant to be, are not
        taken again."""
        tree = self._tree
        wanted = [node for node in nodes if not tree.is_backuped(node)]
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
        self._intended.append(Write(spans))

    def _not_pending(self, nodes: list[int]) -> list[int]:
        """Without the nodes that a write already covers, also where that write's node was split since."""
        writes = [*self._voted.values(), *self._intended]
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
        for write in self._intended:
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
        self._intended = waiting

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
                if tree.is_backuped(node):
                    tree.dec_lock_ref(node, lock)
                else:
                    spans.append(Span(node, info.path_start, info.path_end, lock))
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
        slots = write.slots
        if not write.attempt:
            # Before a second attempt what the poorest rank lacked was evicted, which the agreed capacity shows later.
            self._tree.make_host_room(slots)
        self._capacity.take_host(slots)
        write.reserved = self._reserve_here(write)
        self._voted[operation] = write
        if write.reserved:
            self._rounds.vote_yes(operation, kind)
        else:
            short = max(1, slots - self._tree.cache_controller.mem_pool_host.available_size())
            self._rounds.vote_no(operation, kind, Reason.HOST_FULL, {HOST: short})

    def _reserve_here(self, write: Write) -> list[Any]:
        """Host slots for every span or for none. Nothing is copied, nothing evicted."""
        controller = self._tree.cache_controller
        reserved: list[Any] = []
        for span in write.spans:
            device_slots, transfers = self._tree.tree_core.build_backup_spec(span.node)
            side = self._tree._build_backup_sidecar(device_slots, transfers)
            host_slots = controller.write(device_slots, node_id=span.node, extra_pools=side or None, flush=False)
            if host_slots is None:
                self._release(reserved)
                return []
            reserved.append(controller.write_queue.pop())
        return reserved

    def _release(self, reserved: list[Any]) -> None:
        pools = self._tree.cache_controller.mem_pool_host
        for held in reserved:
            pools.free(held.host_indices)
            pools.release_transfers(held.pool_transfers)

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
        self._release(write.reserved)
        write.reserved = []
        write.attempt += 1
        short = decision.shortfall.get(HOST, 0)
        if write.attempt < ATTEMPTS_MAX and short > 0 and self._tree.evict_host(short) >= short:
            self._intended.append(write)
        else:
            self._drop(write)

    def _commit(self, operation: OperationId, write: Write) -> None:
        """Publishes the reserved slots in the tree and queues the copies.

        If something else brought a node to the host meanwhile, it did so on every rank: nothing is left to do.
        """
        tree = self._tree
        paths = tree.tree_core.collect_path_info([span.node for span in write.spans])
        covers = [
            [info for info in path if span.start <= info.path_start and info.path_end <= span.end]
            for span, path in zip(write.spans, paths, strict=True)
        ]
        if any(tree.is_backuped(info.node_id) for cover in covers for info in cover):
            self._release(write.reserved)
            self._capacity.return_host(write.slots)
            self._drop(write)
            self._rounds.ack(operation)
            return
        for span, cover, queued in zip(write.spans, covers, write.reserved, strict=True):
            for info in cover:
                host_slots = queued.host_indices[info.path_start - span.start : info.path_end - span.start]
                tree.tree_core.commit_backup(info.node_id, host_slots, {})
            tree._track_write_through_node(span.node, span.lock, publish_node_ids=[info.node_id for info in cover])
            tree.cache_controller.write_queue.append(queued)
        self._copies.begin(operation, [span.node for span in write.spans])

    def _drop(self, write: Write) -> None:
        for span in write.spans:
            self._tree.dec_lock_ref(span.node, span.lock)

    def reset(self) -> None:
        """The tree and the host pool are empty. What was voted on is answered and changes nothing."""
        self._intended.clear()
        self._voted.clear()
