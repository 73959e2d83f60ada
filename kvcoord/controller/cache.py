"""One rank's cache: the calls of its engine, the decisions and completions of its group, the ends of its copies.

Each public method is one event; what it brings about is appended to `state.effects`. In lockstep every rank goes
through the same calls, decisions and completions in the same order; only the ends of copies come when they come, and
nothing that the ranks must have in common depends on them.
"""

from collections.abc import Collection, Sequence

from kvcoord.controller.leases import Lease
from kvcoord.controller.loads import Loads
from kvcoord.controller.operations import Call, Operation
from kvcoord.controller.room import Room
from kvcoord.controller.state import CacheState, outcome_of
from kvcoord.controller.tiers import ENGINE, INDEX
from kvcoord.controller.transfers import Transfers
from kvcoord.controller.writebacks import WriteBacks
from kvcoord.controller.writes import Writes
from kvcoord.domain import (
    Aborted,
    OperationId,
    OperationKind,
    Outcome,
    PageKey,
    Path,
    Reason,
    Tier,
    WritePolicy,
)
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.index.tails import Positions
from kvcoord.memory.reservation import Refusal, Reservation
from kvcoord.protocol.local import Allocated, Done, Evicted, Matched, Slots, Written
from kvcoord.protocol.messages import Completion, Decision, Vote


class Cache:
    """The cache logic of one rank, in lockstep."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.room = Room(state)
        self.transfers = Transfers(state, self._copy_ended, self._published, self._retracted)
        self.writes = Writes(state, self.room, self.transfers)
        self.loads = Loads(state, self.room, self.transfers)
        if state.policy is WritePolicy.WRITE_BACK:
            self.room.demote = WriteBacks(state, self.room, self.transfers).demote
        self._allocating: dict[OperationId, tuple[Call, int, Reservation | None]] = {}
        self._parked: tuple[OperationId, Call, int] | None = None

    # --- the engine's calls ---------------------------------------------------------------------------------------

    def match(self, keys: list[PageKey], call: Call) -> None:
        found = self.state.tree.match(keys)
        self.state.reply(call, Matched(found.device_pages, found.host_pages))

    def acquire(self, keys: list[PageKey], call: Call, *, landed: bool) -> None:
        """Holds a path on the device."""
        self.loads.acquire(keys, call, landed=landed)

    def load_slots(self, keys: list[PageKey], slots: Slots, call: Call, *, landed: bool) -> None:
        """Loads what is on the host into slots that the engine has allocated."""
        self._check_slots(slots, None)
        self.loads.load_slots(keys, slots, call, landed=landed)

    def release(self, number: int, call: Call) -> None:
        """The engine no longer reads the pages of this lease. With loads under way it ends when they have."""
        lease = self._lease(number)
        lease.release_asked = True
        if not lease.loads:
            self._end(lease)
        self.state.reply(call, Done())

    def write_lease(self, number: int, call: Call, *, deferred: bool) -> None:
        """Publishes what was computed under this lease, once all it was computed from has landed on all ranks."""
        lease = self._lease(number)
        if lease.write_asked is not None or lease.release_asked:
            raise UsageError("lease", number, "write the pages of a lease once, before it is released")
        lease.write_asked = self.state.next_serial()
        if lease.loads:
            self.state.reply(call, Written(None, f"{OperationKind.WRITE_THROUGH}/{lease.write_asked}/0", 0))
        else:
            self._write(lease, call, deferred=deferred)

    def write_slots(self, keys: list[PageKey], slots: Sequence[list[int]], call: Call, *, deferred: bool) -> None:
        """Publishes the last pages of the path, computed in slots from `allocate`, and writes them through."""
        self._check_slots(slots, len(keys))
        self.state.tick += 1
        self.state.pools.hand_over(Tier.DEVICE, slots, ENGINE, INDEX)
        kept = self._insert(keys, slots, self.state.tick)
        self.state.pools.free_slots(Tier.DEVICE, kept, INDEX)
        self.writes.write_through(keys, self.state.tick, self.state.next_serial(), call, deferred=deferred)

    def allocate(self, count: int, call: Call) -> None:
        """Device slots for pages without a key yet."""
        if count < 0:
            raise UsageError("count", count, "allocate a number of pages that is not negative")
        state = self.state
        operation, tails = f"{OperationKind.ALLOCATE}/{state.next_serial()}/0", state.pools.ends(count)
        covered = self.room.make(Tier.DEVICE, count, (), tails)
        if not covered and not state.immediate_allowed:
            reason, shortfall = self.room.shortfall(Tier.DEVICE, count, tails)
            decision = Decision(operation, Outcome.ABORT, 0, None, reason, -1, shortfall)
            self._allocated(decision, call, count, None, Path.COVERED)
            return
        state.consensus.issue(Tier.DEVICE, count, tails)
        taken = state.pools.reserve(Tier.DEVICE, count, ENGINE, tails)
        if covered:
            self._allocate_covered(operation, call, count, taken)
            return
        held = taken if isinstance(taken, Reservation) else None
        self._allocating[operation] = (call, count, held)
        state.waiting_for = operation
        if isinstance(taken, Reservation):
            vote = Vote(operation, OperationKind.ALLOCATE, True)
        else:
            reason = state.pools.reason(Tier.DEVICE, taken.shortfall)
            vote = Vote(operation, OperationKind.ALLOCATE, False, reason=reason, shortfall=taken.shortfall)
        decided = state.consensus.propose(vote, deferred=False)
        if decided is not None:
            self.decide(decided)

    def free(self, slots: Sequence[list[int]], call: Call) -> None:
        """Slots from `allocate` that were not used."""
        self._check_slots(slots, None)
        self.state.pools.free_slots(Tier.DEVICE, slots, ENGINE)
        self.state.reply(call, Done())

    def evict(self, tier: Tier, count: int, call: Call) -> None:
        """Takes up to `count` pages off a tier, the same on every rank."""
        if count < 0:
            raise UsageError("count", count, "evict a number of pages that is not negative")
        self.state.reply(call, Evicted(self.room.evict(tier, count)))

    # --- the group's word -----------------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> bool:
        """The outcome of an operation put to the vote. Whether it was one of ours that is open."""
        if self.loads.decide(decision):
            return True
        allocating = self._allocating.pop(decision.operation, None)
        if allocating is not None:
            self.state.waiting_for = None
            self._allocated(decision, *allocating, Path.IMMEDIATE)
            return True
        op = self.state.operations.get(decision.operation)
        if op is None:
            return False
        self.writes.decide(op, decision, op.path)
        return True

    def complete(self, completion: Completion) -> bool:
        """All copies of an operation have landed, or one failed. Whether it was news here."""
        return self.transfers.complete(completion)

    def copy_ended(self, operation: OperationId, error: Reason | None) -> None:
        """This rank's own copy is over."""
        self.transfers.copy_ended(operation, error)

    def give_up(self, operations: list[OperationId]) -> None:
        """Nobody waits any longer for this rank's own copies of these."""
        for operation in operations:
            self.transfers.give_up(operation)

    def abandon(self) -> None:
        """This cache ends with its membership or its history. No copy of its runs any more."""
        for _, _, held in self._allocating.values():
            if held is not None:
                held.abort()
        self._allocating.clear()
        self.transfers.abandon()
        self.loads.abandon()

    @property
    def awaited(self) -> Collection[OperationId]:
        """Operations for whose copies on this rank calls wait."""
        return self.loads.awaited

    @property
    def parked(self) -> bool:
        """Whether a call waits for slots that are agreed as free and still being copied from."""
        return self._parked is not None or self.loads.parked

    def open_count(self) -> int:
        """Operations that have not ended on all ranks: the same number on every rank at the same point."""
        return len(self.state.operations)

    # --- what follows ---------------------------------------------------------------------------------------------

    def _copy_ended(self, op: Operation) -> None:
        self.loads.copy_ended(op)
        if op.leaving and self._parked is not None:
            operation, call, count = self._parked
            pools = self.state.pools
            taken = pools.reserve(Tier.DEVICE, count, ENGINE, pools.ends(count))
            self._allocate_covered(operation, call, count, taken)

    def _published(self, op: Operation) -> None:
        if op.tier is Tier.DEVICE:
            self.loads.published(op)
            self._resume(op)

    def _retracted(self, op: Operation) -> None:
        if op.tier is Tier.DEVICE:
            self.loads.retracted(op)
            self._resume(op)

    def _resume(self, op: Operation) -> None:
        """Leases that waited for this load-back go on."""
        for lease in op.leases:
            if lease.loads:
                continue
            if lease.write_asked is not None:
                if lease.broken:
                    name = f"{OperationKind.WRITE_THROUGH}/{lease.write_asked}/0"
                    self.state.outcomes.append(Aborted(name, Path.COVERED, Reason.SOURCE_GONE))
                else:
                    self._write(lease, None, deferred=True)
            if lease.release_asked:
                self._end(lease)
        op.leases.clear()

    def _write(self, lease: Lease, call: Call | None, *, deferred: bool) -> None:
        state = self.state
        assert lease.write_asked is not None
        if lease.broken:
            outcome = Aborted(f"{OperationKind.WRITE_THROUGH}/{lease.write_asked}/0", Path.COVERED, Reason.SOURCE_GONE)
            if call is not None:
                state.reply(call, Written(outcome, outcome.operation, 0))
            return
        if lease.own and lease.own[0]:
            count, ends = len(lease.own[0]), self._ends(lease.keys, lease.own)
            state.pools.hand_over(Tier.DEVICE, lease.own, lease.owner, INDEX)
            kept = self._insert(lease.keys, lease.own, lease.tick)
            state.pools.hand_over(Tier.DEVICE, kept, INDEX, lease.owner)
            lease.own = kept
            lease.pins.append(state.tree.pin(lease.keys, lease.first_new, count, Tier.DEVICE))
            if state.tree.hybrid:
                lease.tail_pins.append(state.tree.tails.pin(Tier.DEVICE, lease.keys, ends))
        self.writes.write_through(lease.keys, lease.tick, lease.write_asked, call, deferred=deferred)

    def _insert(self, keys: list[PageKey], slots: Sequence[list[int]], tick: int) -> tuple[list[int], ...]:
        """Publishes the last pages of a path on the device. Returns the slots that the index does not take."""
        tree, page_pools = self.state.tree, self.state.pools.page_pools
        kept = tree.insert(keys, len(keys) - len(slots[0]), slots[:page_pools], tick)
        if tree.hybrid:
            kept += tree.publish_tails(Tier.DEVICE, keys, self._ends(keys, slots), tuple(slots[page_pools:]), tick)
        return kept

    def _ends(self, keys: list[PageKey], slots: Sequence[list[int]]) -> Positions:
        """The pages of a path that have these slots in the pools of ends: the last ones."""
        end = len(keys)
        return tuple([list(range(end - len(held), end)) for held in slots[self.state.pools.page_pools :]])

    def _end(self, lease: Lease) -> None:
        del self.state.leases[lease.number]
        self.state.unpin(lease)
        self.loads.ended(lease)
        self.state.pools.free_slots(Tier.DEVICE, lease.own, lease.owner)
        lease.own = ()

    def _allocate_covered(self, operation: OperationId, call: Call, count: int, taken: Reservation | Refusal) -> None:
        """Agreed: fits on every rank, now or when copies out of slots that were given up are over."""
        state = self.state
        if isinstance(taken, Reservation):
            self._parked = None
            state.waiting_for = None
            self._allocated(Decision(operation, Outcome.COMMIT), call, count, taken, Path.COVERED)
        elif state.leaving():
            self._parked = (operation, call, count)
            state.waiting_for = operation
        else:
            raise InvariantBroken("a covered reserve fits on every rank", f"{operation} lacks {taken.shortfall}")

    def _allocated(self, decision: Decision, call: Call, count: int, taken: Reservation | None, path: Path) -> None:
        state = self.state
        state.count(OperationKind.ALLOCATE, path, decision)
        state.digest.apply(f"{decision.outcome} {decision.operation} {count}")
        slots: list[list[int]] = []
        if decision.outcome is Outcome.COMMIT:
            assert taken is not None
            taken.commit()
            slots = list(state.pools.slots(Tier.DEVICE, taken))
        elif taken is not None:
            taken.abort()
        state.reply(call, Allocated(outcome_of(decision, path), slots))

    def _lease(self, number: int) -> Lease:
        lease = self.state.leases.get(number)
        if lease is None:
            raise UsageError("lease", number, "is not held: it was released, or never granted")
        return lease

    def _check_slots(self, slots: Sequence[list[int]], pages_max: int | None) -> None:
        """What the engine names: with `pages_max` the slots of so many pages at most, as `allocate` gives them."""
        pools = self.state.pools
        lengths = [len(held) for held in slots]
        of_pages, of_tails = lengths[: pools.page_pools], tuple(lengths[pools.page_pools :])
        if len(slots) != len(pools.device) or len(set(of_pages)) != 1:
            fix = f"give one list for each of the {len(pools.device)} pools, equally long where every page has a slot"
            raise UsageError("slots", lengths, fix)
        if pages_max is not None and of_pages[0] > pages_max:
            raise UsageError("slots", lengths, f"there are only {pages_max} page keys")
        if pages_max is not None and of_tails != pools.ends(of_pages[0]):
            fix = f"pools that keep only ends have slots for the last pages: {pools.ends(of_pages[0])} of these"
            raise UsageError("slots", lengths, fix)
        pools.check_owner(Tier.DEVICE, slots, ENGINE)
