"""Holding a path on the device: one transaction of pins, device slots and a load-back, rolled back on every path.

The pages of a path are of four kinds: on the device (pinned), on the host (pinned there, then loaded), being loaded for
somebody else (shared), and new (the engine will compute them). Slots for what is missing are reserved together, on all
ranks or on none.
"""

from collections.abc import Callable, Collection
from functools import partial

from kvcoord.controller.acquisition import Acquisition, look, unloaded
from kvcoord.controller.leases import Lease
from kvcoord.controller.operations import Call, Operation
from kvcoord.controller.room import Room
from kvcoord.controller.state import CacheState, outcome_of, with_error
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import OperationId, OperationKind, Outcome, PageKey, Path, Reason, Tier
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.protocol.local import Acquired, Loaded, Slots
from kvcoord.protocol.messages import Decision, Vote


class Loads:
    """Decides acquires and follows their load-backs. Answers calls; what it holds it gives back on every path."""

    def __init__(self, state: CacheState, room: Room, transfers: Transfers) -> None:
        self._state = state
        self._room = room
        self._transfers = transfers
        self._undecided: dict[OperationId, Acquisition] = {}
        self._landing: dict[OperationId, list[Callable[[Operation], None]]] = {}
        self._parked: Acquisition | None = None
        self._outside: dict[int, list[Operation]] = {}
        """Load-backs with slots that a lease reads and the index does not have, by its number."""

    def acquire(self, keys: list[PageKey], call: Call, *, landed: bool) -> None:
        """Begins a lease. `state.waiting_for` says whether the outcome has to be waited for."""
        wanted = look(self._state, self._transfers, keys, call, landed=landed)
        op, state = wanted.operation, self._state
        pages, tails = wanted.pages_missing, wanted.tails_missing
        if state.at_limit():
            self._abort(wanted, Decision(op.id, Outcome.ABORT, 0, None, Reason.LIMIT, state.rank), Path.COVERED)
            return
        covered = self._room.make(Tier.DEVICE, pages, keys, tails)
        if not covered and not state.immediate_allowed:
            reason, shortfall = self._room.shortfall(Tier.DEVICE, pages, tails)
            self._abort(wanted, Decision(op.id, Outcome.ABORT, 0, None, reason, -1, shortfall), Path.COVERED)
            return
        if pages or any(tails):
            state.consensus.issue(Tier.DEVICE, pages, tails)
        refused = wanted.reserve()
        if covered:
            if refused is None:
                self._grant(wanted, Path.COVERED)
            elif state.leaving():
                self._parked = wanted
                state.waiting_for = op.id
            else:
                raise InvariantBroken("a covered reserve fits on every rank", f"{op.id} lacks {refused.shortfall}")
            return
        if refused is None:
            vote = Vote(op.id, op.kind, True)
        else:
            reason = state.pools.reason(Tier.DEVICE, refused.shortfall)
            vote = Vote(op.id, op.kind, False, reason=reason, shortfall=refused.shortfall)
        self._undecided[op.id] = wanted
        state.waiting_for = op.id
        decision = state.consensus.propose(vote, deferred=False)
        if decision is not None:
            self.decide(decision)

    @property
    def awaited(self) -> Collection[OperationId]:
        """Operations for whose copies on this rank calls wait."""
        return self._landing.keys()

    @property
    def parked(self) -> bool:
        """Whether an acquire waits for slots that are agreed as free and still being copied from."""
        return self._parked is not None

    def decide(self, decision: Decision) -> bool:
        """The outcome of an acquire that was put to the vote. Whether it was one."""
        wanted = self._undecided.pop(decision.operation, None)
        if wanted is None:
            return False
        self._state.waiting_for = None
        if decision.outcome is Outcome.COMMIT:
            self._grant(wanted, Path.IMMEDIATE)
        else:
            self._abort(wanted, decision, Path.IMMEDIATE)
        return True

    def abandon(self) -> None:
        """This cache ends: acquires without an outcome hold nothing any more. The worker answers their calls."""
        parked = [] if self._parked is None else [self._parked]
        for wanted in [*self._undecided.values(), *parked]:
            for held in (wanted.operation.reservation, wanted.new):
                if held is not None:
                    held.abort()
        for ops in self._outside.values():
            for op in ops:
                self._transfers.give_back(op)
        self._undecided.clear()
        self._outside.clear()
        self._parked = None

    def copy_ended(self, op: Operation) -> None:
        """This rank's copy is over, or given up: whoever waits for it, or for the slots it leaves, goes on."""
        if op.leaving and self._parked is not None and self._parked.reserve() is None:
            wanted, self._parked = self._parked, None
            self._state.waiting_for = None
            self._grant(wanted, Path.COVERED)
        for landed in self._landing.pop(op.id, ()):
            landed(op)

    def published(self, op: Operation) -> None:
        """Loaded on all ranks: the leases that use these pages hold them like any other page."""
        for lease in op.leases:
            lease.loads -= 1
            lease.pins += [self._state.tree.pin(op.keys, first, count, Tier.DEVICE) for first, count in op.runs]
            if any(op.tails):
                # A page whose own load-back has not ended is not there yet: the lease keeps the slot itself.
                lease.tail_pins.append(self._state.tree.tails.pin_there(Tier.DEVICE, op.keys, op.tails))
            if op.spare:
                self._keep_slots(op, lease)

    def retracted(self, op: Operation) -> None:
        """A rank's copy failed: nothing computed from these pages may be published.

        An engine may still read them, so their slots stay with the leases until the last of these has ended.
        """
        for lease in op.leases:
            lease.loads -= 1
            lease.broken = True
            self._keep_slots(op, lease)
            self._state.broken.append(lease.number)

    def _keep_slots(self, op: Operation, lease: Lease) -> None:
        """The slots of a load-back that are not the index's stay as long as this lease."""
        op.holders += 1
        self._outside.setdefault(lease.number, []).append(op)

    def ended(self, lease: Lease) -> None:
        """This lease reads no pages any more."""
        for op in self._outside.pop(lease.number, ()):
            op.holders -= 1
            if not op.holders:
                self._transfers.give_back(op)

    def load_slots(self, keys: list[PageKey], slots: Slots, call: Call, *, landed: bool) -> None:
        """Loads what is on the host, and not on the device nor on its way, into slots that the engine has allocated.

        They were agreed when they were allocated, so nothing has to be decided. The pages of the path that are loaded
        get the first slots; those become the index's when every rank's copy has landed.
        """
        state = self._state
        if state.pools.windows:
            fix = "a group with pools of kind window or state loads what their ends need by itself: acquire the path"
            raise UsageError("load_back", len(keys), fix)
        state.tick += 1
        match = state.tree.match(keys)
        state.tree.touch(keys, state.tick)
        runs = unloaded(state, keys, match.segments)
        op = Operation(OperationKind.LOAD_BACK, state.next_serial(), 0, Tier.DEVICE, keys, runs)
        if state.at_limit():
            aborted = Decision(op.id, Outcome.ABORT, 0, None, Reason.LIMIT, state.rank)
            state.count(op.kind, Path.COVERED, aborted)
            state.reply(call, Loaded(outcome_of(aborted, Path.COVERED), op.id, 0))
            return
        if any(len(held) < op.pages for held in slots):
            raise UsageError("slots", [len(held) for held in slots], f"{op.pages} pages are to be loaded: match first")
        op.tick, op.path = state.tick, Path.COVERED
        decision = Decision(op.id, Outcome.COMMIT)
        state.count(op.kind, op.path, decision)
        state.digest.apply(f"{decision.outcome} {op.id} {op.pages}")
        answer = Loaded(outcome_of(decision, op.path), op.id, op.pages)
        if not op.pages:
            state.reply(call, answer)
            return
        self._transfers.pin_source(op, Tier.HOST)
        op.fixed = tuple([held[: op.pages] for held in slots])
        state.operations[op.id] = op
        self._transfers.commit(op)
        if landed:
            self._landing[op.id] = [lambda op: state.reply(call, with_error(answer, op))]
        else:
            state.reply(call, answer)

    def _one_landed(self, wanted: Acquisition, op: Operation) -> None:
        wanted.copies_open -= 1
        if op.copy_error is not None:
            wanted.error = str(op.copy_error)
        if not wanted.copies_open:
            self._answer(wanted)

    def _grant(self, wanted: Acquisition, path: Path) -> None:
        state, op, lease = self._state, wanted.operation, wanted.lease
        decision = Decision(op.id, Outcome.COMMIT)
        self._record(wanted, decision, path)
        assert wanted.new is not None
        assert op.reservation is not None
        wanted.new.commit()
        lease.own = state.pools.slots(Tier.DEVICE, wanted.new)
        wanted.fill()
        state.leases[lease.number] = lease
        state.counters.pages_hit[Tier.DEVICE] += lease.device_pages
        state.counters.pages_hit[Tier.HOST] += lease.host_pages
        if op.moves:
            state.operations[op.id] = op
            wanted.shared[op.id] = op
            self._transfers.commit(op)
        else:
            op.reservation.commit()
        for load in wanted.shared.values():
            load.leases.append(lease)
            lease.loads += 1
            if load.copy_error is not None:
                wanted.error = str(load.copy_error)
            elif wanted.landed and load.copy_open:
                wanted.copies_open += 1
                self._landing.setdefault(load.id, []).append(partial(self._one_landed, wanted))
        if not wanted.copies_open:
            self._answer(wanted)

    def _abort(self, wanted: Acquisition, decision: Decision, path: Path) -> None:
        """Everything goes back, and the engine is told what was cached all the same."""
        self._record(wanted, decision, path)
        op, lease = wanted.operation, wanted.lease
        for held in (op.reservation, wanted.new):
            if held is not None:
                held.abort()
        self._state.unpin(op)
        self._state.unpin(lease)
        outcome = outcome_of(decision, path)
        answer = Acquired(outcome, 0, lease.device_pages, lease.host_pages, [], [], op.id)
        self._state.reply(wanted.call, answer)

    def _record(self, wanted: Acquisition, decision: Decision, path: Path) -> None:
        op, lease = wanted.operation, wanted.lease
        op.path = path
        self._state.counters.pages_requested += len(lease.keys)
        self._state.count(op.kind, path, decision)
        self._state.digest.apply(
            f"{decision.outcome} {op.id} {lease.device_pages}+{lease.host_pages} of {len(lease.keys)}"
        )

    def _answer(self, wanted: Acquisition) -> None:
        op, lease = wanted.operation, wanted.lease
        outcome = outcome_of(Decision(op.id, Outcome.COMMIT), op.path)
        answer = Acquired(
            outcome,
            lease.number,
            lease.device_pages,
            lease.host_pages,
            [*wanted.slots, *wanted.tail_slots],
            op.runs,
            op.id,
            wanted.error,
        )
        self._state.reply(wanted.call, answer)
