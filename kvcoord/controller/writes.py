"""Writes from device to host: reserve, commit or abort, and one retry after an agreed eviction. DESIGN section 4.1.

`reserve_write` only allocates; `commit_write` starts the copy; `abort_write` gives back. A write names the pages of one
path that are on the device, not on the host, and not being written already, ancestors included, so that what is on the
host stays reachable from the root. In pools that keep only ends the ends go along, so that it is usable.
"""

from collections.abc import Sequence

from kvcoord.controller.operations import Call, Operation, Run, runs_of
from kvcoord.controller.placing import near, take_part, where
from kvcoord.controller.room import Room
from kvcoord.controller.state import CacheState, outcome_of
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import (
    Aborted,
    Committed,
    OperationKind,
    Outcome,
    PageKey,
    Path,
    Reason,
    Shortfall,
    Tier,
    WritePolicy,
)
from kvcoord.errors import InvariantBroken
from kvcoord.index.tails import Positions
from kvcoord.memory.reservation import Refusal
from kvcoord.protocol.local import Written
from kvcoord.protocol.messages import Decision, Vote

_FULL = (Reason.HOST_FULL, Reason.AUXILIARY_FULL)

ATTEMPTS_MAX = 2
"""A write that was aborted for lack of room is tried once more after an eviction, under a new id."""


class Writes:
    """Starts writes and takes their decisions, in lockstep: capacity and victims are the same on all ranks."""

    def __init__(self, state: CacheState, room: Room, transfers: Transfers) -> None:
        self._state = state
        self._room = room
        self._transfers = transfers

    def write_through(self, keys: list[PageKey], tick: int, serial: int, call: Call | None, *, deferred: bool) -> None:
        """Writes what the policy wants of this path, unless it is there or under way.

        What is not covered is put to the vote of the next frame when `deferred` (the engine learns the outcome with a
        later step), else to a vote of its own, whose outcome answers `call`.
        """
        runs = [] if self._state.policy is WritePolicy.WRITE_BACK else self._unwritten(keys)
        op = Operation(OperationKind.WRITE_THROUGH, serial, 0, Tier.HOST, keys, runs, self._tails_unwritten(keys, runs))
        if not op.moves:
            self._tell(op, call, Committed(op.id, Path.COVERED))
            return
        if self._state.at_limit():
            decision = Decision(op.id, Outcome.ABORT, 0, None, Reason.LIMIT, self._state.rank)
            self._state.count(op.kind, Path.COVERED, decision)
            self._tell(op, call, outcome_of(decision, Path.COVERED))
            return
        op.tick = tick
        op.deferred = deferred or not self._state.immediate_allowed
        op.asked_by = call
        self.reserve_write(op)
        if op.deferred and op.asked_by is not None:
            self._state.reply(op.asked_by, Written(None, op.id, op.pages))
            op.asked_by = None

    def reserve_write(self, op: Operation, at_least: int = 0, tails_at_least: Sequence[int] = ()) -> None:
        """Allocates host slots for the operation's pages, covered or put to the vote. Copies nothing.

        `at_least` pages are evicted first if need be: the shortfall that an earlier vote has shown.
        """
        state, keys, tails = self._state, op.keys, op.tail_counts
        self._transfers.pin_source(op, Tier.DEVICE)
        state.operations[op.id] = op
        self._transfers.claim(op)
        covered = self._room.make(Tier.HOST, op.pages, keys, tails, at_least=at_least, tails_at_least=tails_at_least)
        state.consensus.issue(Tier.HOST, op.pages, tails)
        taken = state.pools.reserve(
            Tier.HOST, op.pages, op.id, tails, near(state, keys, op.runs[0][0] if op.runs else 0)
        )
        if isinstance(taken, Refusal):
            if covered:
                raise InvariantBroken("a covered reserve fits on every rank", f"{op.id} lacks {taken.shortfall}")
            reason = state.pools.reason(Tier.HOST, taken.shortfall)
            vote = Vote(op.id, op.kind, False, reason=reason, shortfall=taken.shortfall)
        else:
            op.reservation = taken
            take_part(state, op)
            vote = Vote(op.id, op.kind, True, participants=op.participants)
        if covered:
            self.decide(op, Decision(op.id, Outcome.COMMIT), Path.COVERED)
            return
        if op.deferred:
            op.path = Path.VOTED
        else:
            op.path = Path.IMMEDIATE
            state.waiting_for = op.id
        decision = state.consensus.propose(vote, deferred=op.deferred)
        if decision is not None:
            self.decide(op, decision, op.path)

    def decide(self, op: Operation, decision: Decision, path: Path) -> None:
        """The outcome, the same on every rank: commit or abort, and after an abort for lack of room one more try."""
        state = self._state
        op.path = path
        state.count(op.kind, path, decision)
        state.digest.apply(f"{decision.outcome} {op.id} {op.extent}{where(state, op)}")
        if decision.outcome is Outcome.COMMIT:
            self.commit_write(op)
        else:
            self.abort_write(op)
            if decision.reason in _FULL and self._retry(op, decision.shortfall):
                return
        self._settled(op, outcome_of(decision, path))

    def commit_write(self, op: Operation) -> None:
        """Starts the copy."""
        self._transfers.commit(op)

    def abort_write(self, op: Operation) -> None:
        """Gives the pages back; nothing was copied."""
        self._transfers.abort(op)

    def _retry(self, op: Operation, shortfall: Shortfall) -> bool:
        """Tries once more under a new id if an eviction can help. Whether it did."""
        state, runs = self._state, self._unwritten(op.keys)
        tails = self._tails_unwritten(op.keys, runs)
        again = Operation(op.kind, op.serial, op.attempt + 1, Tier.HOST, op.keys, runs, tails)
        evictable = state.tree.evictable(Tier.HOST) or any(book.evictable for book in state.tree.tails.on(Tier.HOST))
        if again.attempt >= ATTEMPTS_MAX or not again.moves or not evictable:
            return False
        again.tick, again.deferred = op.tick, op.deferred
        again.asked_by, op.asked_by = op.asked_by, None
        self.reserve_write(again, *state.pools.missing(Tier.HOST, shortfall))
        return True

    def _settled(self, op: Operation, outcome: Committed | Aborted) -> None:
        if not op.deferred:
            self._state.waiting_for = None
        call, op.asked_by = op.asked_by, None
        self._tell(op, call, outcome)

    def _tell(self, op: Operation, call: Call | None, outcome: Committed | Aborted) -> None:
        """The engine learns the outcome: as the answer to its call, or with a later step."""
        if call is not None:
            self._state.reply(call, Written(outcome, op.id, op.pages))
        else:
            self._state.outcomes.append(outcome)

    def _unwritten(self, keys: list[PageKey]) -> list[Run]:
        """Runs of the path that the policy wants on the host and nobody is writing."""
        runs = self._state.tree.unbacked(keys, self._state.hits_min)
        writing = self._state.in_flight[Tier.HOST]
        if not writing:
            return runs
        return runs_of([at for first, count in runs for at in range(first, first + count) if keys[at] not in writing])

    def _tails_unwritten(self, keys: list[PageKey], runs: list[Run]) -> Positions:
        """Pages whose slots in the pools of ends go to the host too: at the end of the path, and of what is written.

        What an earlier end has lost on the host stays lost: it would only push out ends that are in use.
        """
        tree = self._state.tree
        if not tree.hybrid:
            return ()
        there = {at for first, count in [*tree.resident(keys, Tier.HOST), *runs] for at in range(first, first + count)}
        ends = zip(tree.tails.ends(len(keys)), tree.tails.ends(sum(runs[-1]) if runs else 0), strict=True)
        writing = self._state.tails_in_flight[Tier.HOST]
        books = zip(tree.tails.on(Tier.DEVICE), tree.tails.on(Tier.HOST), writing, ends, strict=True)
        return tuple(
            [
                [
                    at
                    for at in sorted(there.intersection({*end, *written}))
                    if keys[at] in device.pages and keys[at] not in host.pages and keys[at] not in others
                ]
                for device, host, others, (end, written) in books
            ]
        )
