"""The cache of a rank whose engine does not run in lockstep: every operation is voted on, in the order of the stream.

The engine owns its device slots and names its operations, so that all ranks mean the same change whenever they come to
it; only the host tier is known here. The index changes at entries of the stream alone, and recency is their number, so
it is the same on every rank at the same entry. What a rank needs in between (pages it reads, pages it has offered for
eviction) is pinned or set aside, and shows in its votes.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Final

from kvcoord.controller.operations import Call, Operation, Phase, runs_of
from kvcoord.controller.state import CacheState, joined, outcome_of, with_error
from kvcoord.controller.tiers import INDEX
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import Aborted, Agreement, OperationId, OperationKind, Outcome, PageKey, Path, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.memory.reservation import Refusal
from kvcoord.protocol.local import Loaded, Matched, Slots, Written
from kvcoord.protocol.messages import Ack, Completion, Decision, Vote

NAME_LENGTH_MAX: Final = 100

_SHORTFALL: Final = "shortfall/"
_EVICTION: Final = "evict/"
"""Prefixes of the two operations that make room for a write: how much is missing at most, and which pages go."""


class _Asked:
    """A write that the engine asked for, kept until its last attempt is decided."""

    __slots__ = ("call", "first", "keys", "slots")

    def __init__(self, keys: list[PageKey], first: int, slots: Slots, call: Call) -> None:
        self.keys, self.first, self.slots, self.call = keys, first, slots, call


class StreamingCache:
    """Writes, load-backs and evictions of one rank, each decided by a vote of its own.

    `names_kept_max` bounds what is remembered of operations that this rank has not come to.
    """

    def __init__(self, state: CacheState, names_kept_max: int) -> None:
        self.state = state
        self.transfers = Transfers(state, self._copy_ended, _ignore, _ignore)
        self._names_kept_max = names_kept_max
        self._asked: dict[OperationId, _Asked] = {}
        self._retrying: set[OperationId] = set()
        self._retried_elsewhere: OrderedDict[OperationId, None] = OrderedDict()
        """Writes whose first attempt was aborted for lack of room before this rank came to them."""
        self._offered: dict[OperationId, list[tuple[list[PageKey], int]]] = {}
        """Pages that this rank has voted may go, by eviction: path and position, deepest first."""
        self._set_aside: Counter[PageKey] = Counter()
        self._landing: dict[OperationId, tuple[Call, Loaded]] = {}
        self._landed_asked: set[OperationId] = set()

    # --- the engine's calls ---------------------------------------------------------------------------------------

    def match(self, keys: list[PageKey], call: Call) -> None:
        """What of the path is on the host; the engine knows its own device pages."""
        self.state.reply(call, Matched(0, self._held(keys, 0)))

    def write(self, keys: list[PageKey], slots: Slots, name: OperationId, call: Call) -> None:
        """Copies the last pages of the path, in the engine's `slots`, to the host. Answered with the decision."""
        first = self._first(keys, slots, name)
        if name in self._asked:
            raise UsageError("operation", name, "is open already: give every operation an id of its own")
        if self.state.at_limit():
            self.state.reply(call, Written(self._limited(name), name, 0))
            return
        self._asked[name] = _Asked(keys, first, slots, call)
        self._reserve_write(name, 1 if name in self._retried_elsewhere else 0)

    def load(self, keys: list[PageKey], slots: Slots, name: OperationId, call: Call, *, landed: bool) -> None:
        """Copies as many of the last pages of the path as *every* rank holds on the host into the engine's `slots`."""
        state = self.state
        first = self._first(keys, slots, name)
        if name in state.operations:
            raise UsageError("operation", name, "is open already: give every operation an id of its own")
        if state.at_limit():
            state.reply(call, Loaded(self._limited(name), name, 0))
            return
        pages = self._held(keys, first)
        op = Operation(OperationKind.LOAD_BACK, 0, 0, Tier.DEVICE, keys, [(first, pages)] if pages else [])
        op.id, op.path, op.asked_by, op.fixed = name, Path.IMMEDIATE, call, tuple(slots)
        op.pins = [state.tree.pin(keys, start, count, Tier.HOST) for start, count in op.runs]
        state.operations[op.id] = op
        if landed:
            self._landed_asked.add(op.id)
        self._propose(Vote(op.id, op.kind, True, Agreement.MIN, value=pages))

    # --- the stream -----------------------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        """The next decision of the stream, whether or not this rank has come to the operation."""
        state = self.state
        state.tick = max(decision.sequence, state.tick)
        state.digest.apply(f"{decision.outcome} {decision.operation}")
        self._settle(decision)

    def _settle(self, decision: Decision) -> None:
        """What follows from a decision: now, or when this rank comes to an operation that was decided before."""
        state = self.state
        op = state.operations.get(decision.operation)
        if decision.operation.startswith(_SHORTFALL):
            self._offer(decision)
        elif decision.operation.startswith(_EVICTION):
            self._evict(decision)
        elif op is None:
            if decision.outcome is Outcome.ABORT and decision.reason is Reason.HOST_FULL:
                self._measure(decision, 0)
        else:
            state.count(op.kind, Path.IMMEDIATE, decision)
            if op.kind is OperationKind.LOAD_BACK:
                self._decide_load(op, decision)
            else:
                self._decide_write(op, decision)

    def complete(self, completion: Completion) -> bool:
        """The next completion of the stream."""
        self.state.tick = max(completion.sequence, self.state.tick)
        op = self.state.operations.get(completion.operation)
        if op is not None:
            op.tick = self.state.tick
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
        self.transfers.abandon()

    @property
    def awaited(self) -> Collection[OperationId]:
        """Operations for whose copies on this rank calls wait."""
        return self._landing.keys()

    @property
    def parked(self) -> bool:
        """Nothing here waits for copies: without lockstep slots are handed out when they are free."""
        return False

    def open_count(self) -> int:
        """Operations that have not ended here."""
        return len(self.state.operations)

    # --- writes ---------------------------------------------------------------------------------------------------

    def _reserve_write(self, name: OperationId, attempt: int) -> None:
        """Reserves for what is not on the host, pins what is, and votes.

        Whatever else is under way here may be under way on no other rank, or be aborted: it does not count, so that
        every page of the operation is on the host of every rank when it completes.
        """
        state, asked = self.state, self._asked[name]
        keys = asked.keys
        resident = state.tree.resident(keys, Tier.HOST)
        kept = [at for start, count in resident for at in range(start, start + count) if not self._set_aside[keys[at]]]
        there = set(kept)
        missing = [at for at in range(asked.first, len(keys)) if at not in there]
        op = Operation(OperationKind.WRITE_THROUGH, 0, attempt, Tier.HOST, keys, runs_of(missing))
        op.id, op.path = f"{name}/{attempt}", Path.IMMEDIATE
        op.source_slots = tuple([[pool[at - asked.first] for at in missing] for pool in asked.slots])
        op.pins = [state.tree.pin(keys, start, count, Tier.HOST) for start, count in runs_of(kept)]
        taken = state.pools.reserve(Tier.HOST, op.pages, op.id)
        if isinstance(taken, Refusal):
            vote = Vote(op.id, op.kind, False, reason=Reason.HOST_FULL, shortfall=taken.shortfall)
        else:
            op.reservation = taken
            vote = Vote(op.id, op.kind, True)
        state.operations[op.id] = op
        self.transfers.claim(op)
        self._propose(vote)

    def _decide_write(self, op: Operation, decision: Decision) -> None:
        name = op.id.rpartition("/")[0]
        if decision.outcome is Outcome.COMMIT:
            self._begin_copy(op)
        else:
            self.transfers.abort(op)
            if decision.reason is Reason.HOST_FULL and op.attempt == 0:
                self._retrying.add(name)
                self._measure(decision, max(0, op.pages - self.state.pools.free(Tier.HOST)))
                return
        self._answer_write(name, decision, op.pages)

    def _answer_write(self, name: OperationId, decision: Decision, pages: int) -> None:
        asked = self._asked.pop(name)
        self.state.reply(asked.call, Written(outcome_of(decision, Path.IMMEDIATE), decision.operation, pages))

    # --- evictions ------------------------------------------------------------------------------------------------

    def _measure(self, decision: Decision, short: int) -> None:
        """A write was aborted at the first no. How much do the others lack? The largest shortfall has to go."""
        name, _, attempt = decision.operation.rpartition("/")
        if attempt != "0":
            return
        if name not in self._asked:
            self._retried_elsewhere[name] = None
            if len(self._retried_elsewhere) > self._names_kept_max:
                self._retried_elsewhere.popitem(last=False)
        short = max(short, *decision.shortfall.values())
        self._propose(Vote(f"{_SHORTFALL}{name}", OperationKind.EVICT_HOST, True, Agreement.MAX, value=short))

    def _offer(self, decision: Decision) -> None:
        """Every rank votes which of its pages may go. What all offer goes on all ranks."""
        name = decision.operation.removeprefix(_SHORTFALL)
        count = decision.value if isinstance(decision.value, int) else 0
        victims = self.state.tree.select(Tier.HOST, count)
        pages = [(victim.path, at) for victim in victims for at in range(len(victim.path) - 1, victim.first - 1, -1)]
        eviction = f"{_EVICTION}{name}"
        self._offered[eviction] = pages
        keys = [path[at] for path, at in pages]
        self._set_aside.update(keys)
        self._propose(Vote(eviction, OperationKind.EVICT_HOST, True, Agreement.INTERSECT, value=sorted(keys)))

    def _evict(self, decision: Decision) -> None:
        """Takes the agreed pages off the host, then tries the write again for which they went."""
        state = self.state
        offered = self._offered.pop(decision.operation, [])
        self._set_aside.subtract([path[at] for path, at in offered])
        agreed = set(decision.value) if isinstance(decision.value, list) else set()
        for path, at in offered:
            resident = state.tree.resident(path[: at + 1], Tier.HOST)
            if path[at] in agreed and resident and sum(resident[-1]) == at + 1:
                slots = state.tree.retract_host(path, at, 1)
                state.pools.free_slots(Tier.HOST, slots, INDEX)
                state.counters.pages_evicted[Tier.HOST] += 1
        name = decision.operation.removeprefix(_EVICTION)
        if name not in self._retrying:
            return
        self._retrying.discard(name)
        self._reserve_write(name, 1)

    # --- load-backs -----------------------------------------------------------------------------------------------

    def _decide_load(self, op: Operation, decision: Decision) -> None:
        assert op.asked_by is not None
        call, state = op.asked_by, self.state
        outcome = outcome_of(decision, Path.IMMEDIATE)
        if decision.outcome is Outcome.ABORT:
            self._landed_asked.discard(op.id)
            self.transfers.abort(op)
            state.reply(call, Loaded(outcome, op.id, 0))
            return
        pages = decision.value if isinstance(decision.value, int) else 0
        first = op.runs[0][0] if op.runs else 0
        op.runs = [(first, pages)] if pages else []
        op.pages = pages
        op.source_slots = tuple([pool[:pages] for pool in joined([pin.slots for pin in op.pins])])
        op.fixed = tuple([pool[:pages] for pool in op.fixed or ()])
        state.counters.pages_hit[Tier.HOST] += pages
        if pages:
            state.tree.touch(op.keys[: first + pages], state.tick)
        self._begin_copy(op)
        answer = Loaded(outcome, op.id, pages)
        if op.copy_open and op.id in self._landed_asked:
            self._landing[op.id] = (call, answer)
        else:
            state.reply(call, answer)
        self._landed_asked.discard(op.id)

    def _copy_ended(self, op: Operation) -> None:
        landing = self._landing.pop(op.id, None)
        if landing is not None:
            call, answer = landing
            self.state.reply(call, with_error(answer, op))

    # --- small things ---------------------------------------------------------------------------------------------

    def _begin_copy(self, op: Operation) -> None:
        """Starts the copy; with nothing to copy here, this rank's part is over at once."""
        if op.pages:
            self.transfers.commit(op)
            return
        op.phase = Phase.COPYING
        self.state.consensus.ack(Ack(op.id, True))

    def _propose(self, vote: Vote) -> None:
        decision = self.state.consensus.propose(vote, deferred=False)
        if decision is not None:
            self._settle(decision)

    def _limited(self, name: OperationId) -> Aborted:
        """The answer to one operation too many. This rank does not vote on it, so it commits nowhere."""
        return Aborted(name, Path.IMMEDIATE, Reason.LIMIT, self.state.rank)

    def _held(self, keys: list[PageKey], first: int) -> int:
        """Pages from `first` on that are on the host here and not set aside."""
        end = first
        for start, count in self.state.tree.resident(keys, Tier.HOST):
            if start <= end:
                end = max(end, start + count)
        return next((at for at in range(first, end) if self._set_aside[keys[at]]), end) - first

    def _first(self, keys: list[PageKey], slots: Slots, name: OperationId) -> int:
        """Position of the first page that has a slot."""
        lengths = {len(pool) for pool in slots}
        if len(slots) != len(self.state.pools.names) or len(lengths) != 1 or not 0 < max(lengths) <= len(keys):
            shape = [len(pool) for pool in slots]
            raise UsageError("slots", shape, f"give each pool a slot for the last pages of the {len(keys)} in the path")
        if not name or "/" in name or len(name) > NAME_LENGTH_MAX:
            fix = f"without lockstep every operation needs a name, 1 to {NAME_LENGTH_MAX} characters without a slash"
            raise UsageError("operation", name, f"{fix}, the same on all ranks")
        return len(keys) - max(lengths)


def _ignore(_: Operation) -> None:
    """Nothing of a streaming cache waits for publication: its pages are seen on the host, and nowhere else."""
