"""What every copying operation goes through after COMMIT: copy, ack, completion or retraction.

The one place that knows when pages may go back: an operation's destination when it is retracted and its own copy is
over, its source when no rank's copy reads it any more. A host page that one rank keeps for several goes back when the
copies of all ranks are over: its slot is every rank's.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest

from kvcoord.controller.effects import StartCopy
from kvcoord.controller.operations import Operation, Phase
from kvcoord.controller.placing import copies_here, pages_copied
from kvcoord.controller.state import CacheState, InFlight, joined
from kvcoord.controller.tiers import ENGINE, INDEX
from kvcoord.domain import OperationId, OperationKind, PageKey, Reason, Tier
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.index.node import Slots
from kvcoord.memory.reservation import ReservationState
from kvcoord.protocol.messages import Ack, Completion

Ended = Callable[[Operation], None]


class Transfers:
    """Copies of this rank. `copy_ended` is told when this rank's own copy is over or given up."""

    def __init__(self, state: CacheState, copy_ended: Ended, published: Ended, retracted: Ended) -> None:
        self._state = state
        self._copy_ended = copy_ended
        self._published = published
        self._retracted = retracted

    def pin_source(self, op: Operation, source: Tier) -> None:
        """Keeps what the operation reads until it has ended: its pages, its tails, and the pages of these."""
        tree = self._state.tree
        op.pins = [tree.pin(op.keys, first, count, source) for first, count in op.runs]
        op.source_slots = joined([pin.slots for pin in op.pins])
        if tree.hybrid:
            of_pages = op.source_slots or self._state.pools.beside_pages(())
            op.pins += [tree.pin(op.keys, first, count, source) for first, count in op.pages_of_tails()]
            op.tail_pins = [tree.tails.pin(source, op.keys, op.tails)]
            op.source_slots = of_pages + op.tail_pins[0].slots

    def claim(self, op: Operation) -> None:
        """From here on these pages are on their way to the tier: nobody else need bring them there."""
        in_flight = self._state.in_flight[op.tier]
        for position, key in enumerate(op.page_keys()):
            in_flight[key] = (op, position)
        if op.tails:
            for tail_in_flight, keys in zip(self._state.tails_in_flight[op.tier], op.tail_keys(), strict=True):
                tail_in_flight.update({key: (op, position) for position, key in enumerate(keys)})

    def commit(self, op: Operation) -> None:
        """COMMIT: starts this rank's copy, if it has a part in it. Before it, nothing was copied."""
        op.phase = Phase.COPYING
        self.claim(op)
        if not copies_here(self._state, op):
            self._leave_device(op)
            return
        op.copy_open = True
        source = Tier.DEVICE if op.tier is Tier.HOST else Tier.HOST
        self._state.counters.pages_copied[op.tier] += pages_copied(self._state, op)
        self._state.effects.append(StartCopy(op.id, source, op.source_slots, self.destination(op)))

    def abort(self, op: Operation) -> None:
        """ABORT: everything goes back; no copy was started."""
        del self._state.operations[op.id]
        if op.reservation is not None and op.reservation.state is ReservationState.HELD:
            op.reservation.abort()
        self._disclaim(op)
        self._state.unpin(op)

    def give_up(self, operation: OperationId) -> None:
        """Whoever waits for this rank's own copy is told that it has failed; once it is over the group is told so too.

        Until then it may touch its pages, so it is neither acked nor are they given back.
        """
        op = self._state.operations.get(operation)
        if op is not None and op.copy_open and op.copy_error is None:
            op.copy_error = Reason.COPY_TIMEOUT
            self._copy_ended(op)

    def copy_ended(self, operation: OperationId, error: Reason | None) -> None:
        """This rank's own copy is over: told to the group by the operation's id."""
        op = self._state.operations.get(operation)
        if op is None:
            raise InvariantBroken("a copy belongs to an open operation", operation)
        op.copy_open = False
        op.copy_error = error = op.copy_error or error
        if not self._kept_once(op):
            _release(op)
        self._leave_device(op)
        self._state.consensus.ack(Ack(op.id, error is None, error, op.participants))
        self._copy_ended(op)

    def complete(self, completion: Completion) -> bool:
        """The group's word on an operation's copies. Whether it was news: an operation not open here is ignored."""
        op = self._state.operations.get(completion.operation)
        if op is None or op.phase is Phase.VOTED:
            return False
        if op.phase is Phase.RETRACTED:
            if completion.drained:
                self._end(op)
            return False
        self._disclaim(op)
        if completion.ok:
            self._state.digest.apply(f"complete {op.id}")
            self._publish(op)
            self._end(op)
            return True
        self._state.digest.apply(f"retract {op.id}")
        reason = completion.reason or Reason.COPY_FAILED
        self._state.counters.retractions[reason] = self._state.counters.retractions.get(reason, 0) + 1
        op.source_doubtful = op.kind is OperationKind.LOAD_BACK and reason is Reason.COPY_FAILED
        self._retract(op)
        if completion.drained:
            self._end(op)
        return True

    def abandon(self) -> None:
        """This cache ends, and no copy of its runs any more: what is still held goes back."""
        for op in self._state.operations.values():
            op.copy_open = False
            if op.reservation is None:
                continue
            if op.reservation.state is ReservationState.HELD:
                op.reservation.abort()
            _release(op)
        self._state.operations.clear()

    def destination(self, op: Operation) -> tuple[list[int], ...]:
        """Where the pages go, one list per pool."""
        if op.fixed is not None:
            return op.fixed
        assert op.reservation is not None
        return self._state.pools.slots(op.tier, op.reservation)

    def _publish(self, op: Operation) -> None:
        """All copies have landed on all ranks: lookups may see the pages."""
        if op.copy_open:
            raise InvariantBroken("a completion needs every participant's ack", f"{op.id} is still being copied here")
        state = self._state
        if op.tier is Tier.DEVICE and not state.lockstep:
            self._published(op)
            return
        slots = self.destination(op)
        if op.reservation is not None:
            op.reservation.commit()
        state.pools.hand_over(op.tier, slots, op.id if op.reservation is not None else ENGINE, INDEX)
        publish = state.tree.publish_host if op.tier is Tier.HOST else state.tree.publish_device
        of_pages, of_tails = slots[: state.pools.page_pools], slots[state.pools.page_pools :]
        at = 0
        for first, count in op.runs:
            kept = publish(op.keys, first, count, [pool[at : at + count] for pool in of_pages], op.tick)
            self._set_aside(op, kept)
            at += count
        if any(op.tails):
            kept = state.tree.publish_tails(op.tier, op.keys, op.tails, of_tails, op.tick)
            self._set_aside(op, state.pools.beside_pages(kept))
        self._published(op)
        if not op.holders:
            self.give_back(op)

    def _set_aside(self, op: Operation, kept: Slots) -> None:
        """Slots that the index did not take, since it has these pages: free, unless leases read them."""
        pools = self._state.pools
        if not op.leases:
            pools.free_slots(op.tier, kept, INDEX)
        elif any(kept):
            pools.hand_over(op.tier, kept, INDEX, op.id)
            op.spare = tuple([[*held, *more] for held, more in zip_longest(op.spare, kept, fillvalue=())])

    def _retract(self, op: Operation) -> None:
        op.phase = Phase.RETRACTED
        self._retracted(op)
        if not op.holders:
            self.give_back(op)

    def give_back(self, op: Operation) -> None:
        """Slots that nobody reads any more and the index does not have: free when this rank's copy is over, and those
        of a page that is kept once when no rank copies for the operation any more."""
        if op.spare:
            self._state.pools.free_slots(op.tier, op.spare, op.id)
            op.spare = ()
        if op.reservation is None or op.reservation.state is not ReservationState.HELD:
            return
        if op.copy_open or self._kept_once(op):
            op.reservation.quarantine()
        else:
            op.reservation.abort()

    def _disclaim(self, op: Operation) -> None:
        """Pages that another operation has claimed since stay claimed."""
        _drop_claims(self._state.in_flight[op.tier], op, op.page_keys())
        if op.tails:
            for in_flight, keys in zip(self._state.tails_in_flight[op.tier], op.tail_keys(), strict=True):
                _drop_claims(in_flight, op, keys)

    def _kept_once(self, op: Operation) -> bool:
        """Whether its destination is slots that all ranks have in common."""
        return op.tier is Tier.HOST and self._state.shares is not None

    def _leave_device(self, op: Operation) -> None:
        """This rank copies nothing out of the slots any more that the pages of a write-back leave."""
        if op.leaving:
            for pool, slots in zip(self._state.pools.device, op.source_slots, strict=True):
                pool.release(slots, op.id)

    def _end(self, op: Operation) -> None:
        del self._state.operations[op.id]
        if self._kept_once(op):
            _release(op)
        self._state.unpin(op)
        if op.source_doubtful:
            self._drop_source(op)

    def _drop_source(self, op: Operation) -> None:
        """Host pages that some rank could not load: off the tier on all ranks, or every later load would fail alike.

        Pages that another operation reads stay for now; in lockstep these are the same on every rank.
        """
        tree, pools = self._state.tree, self._state.pools
        for first, count in op.runs:
            with suppress(UsageError):
                pools.free_slots(Tier.HOST, tree.retract_host(op.keys, first, count), INDEX)
        if tree.hybrid:
            dropped = tuple(
                [
                    [book.drop(key) for key in keys if key in book.pages and not book.pages[key].pins]
                    for book, keys in zip(tree.tails.on(Tier.HOST), op.tail_keys(), strict=True)
                ]
            )
            pools.free_slots(Tier.HOST, pools.beside_pages(dropped), INDEX)


def _release(op: Operation) -> None:
    """Slots that only waited for copies to be over."""
    if op.reservation is not None and op.reservation.state is ReservationState.QUARANTINED:
        op.reservation.release()


def _drop_claims(in_flight: InFlight, op: Operation, keys: list[PageKey]) -> None:
    for key in keys:
        claimed = in_flight.get(key)
        if claimed is not None and claimed[0] is op:
            del in_flight[key]
