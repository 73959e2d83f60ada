"""Votes about something of the engine's own, which kvcoord only tallies."""

from kvcoord.controller.consensus import Consensus
from kvcoord.controller.operations import Call
from kvcoord.controller.state import CacheState, outcome_of
from kvcoord.domain import OperationId, OperationKind, Path, Reason
from kvcoord.errors import UsageError
from kvcoord.protocol.local import Agree, Agreed
from kvcoord.protocol.messages import Decision, Value, Vote


class Agreements:
    """Open votes of the engine's own, by operation, with the call that waits for the decision (None: a later step).

    `bytes_max` bounds the values of all of them together: those of one step travel in one frame.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._open: dict[OperationId, Call | None] = {}
        self._bytes: dict[OperationId, int] = {}

    def propose(self, call: Agree, who: Call, state: CacheState, consensus: Consensus) -> None:
        """Puts one to the vote: with the next frame when `deferred`, else at once, which holds up a lockstep engine."""
        if call.operation in self._open or call.operation in state.operations:
            raise UsageError("operation", call.operation, "is open already: give every operation an id of its own")
        size = self._room_for(call.value)
        deferred = call.deferred or not state.immediate_allowed
        vote = Vote(
            call.operation,
            OperationKind.CUSTOM,
            call.yes,
            call.agreement,
            call.participants,
            call.value,
            None if call.yes else call.reason or Reason.REFUSED,
            call.shortfall,
        )
        if deferred:
            state.reply(who, Agreed(None))
        elif state.lockstep:
            state.waiting_for = call.operation
        self._open[call.operation] = None if deferred else who
        self._bytes[call.operation] = size
        decision = consensus.propose(vote, deferred=deferred)
        if decision is not None:
            self._settle(decision, Path.VOTED if deferred else Path.IMMEDIATE, state, in_order=state.lockstep)

    def decide(self, decision: Decision, path: Path, state: CacheState) -> bool:
        """The outcome. Whether it was one of these."""
        if decision.operation not in self._open:
            return False
        self._settle(decision, path, state, in_order=True)
        return True

    def _settle(self, decision: Decision, path: Path, state: CacheState, *, in_order: bool) -> None:
        """`in_order`: this is where all ranks apply it. One that comes late without lockstep has applied it before."""
        who = self._open.pop(decision.operation)
        del self._bytes[decision.operation]
        outcome = outcome_of(decision, path)
        state.count(OperationKind.CUSTOM, path, decision)
        if in_order:
            state.digest.apply(f"{decision.outcome} {decision.operation}")
        if who is None:
            state.outcomes.append(outcome)
            return
        if state.waiting_for == decision.operation:
            state.waiting_for = None
        state.reply(who, Agreed(outcome))

    def begin(self) -> None:
        """A new history: what was open is void."""
        self._open.clear()
        self._bytes.clear()

    def _room_for(self, value: Value) -> int:
        """The bytes of a value. Raises UsageError when they do not fit beside those of the votes that are open."""
        size = sum(map(len, value)) if isinstance(value, list) else 0
        taken = sum(self._bytes.values()) if size else 0
        if taken + size > self._bytes_max:
            fix = f"open votes may have values of {self._bytes_max} bytes together, a quarter of message_bytes_max"
            raise UsageError("value", f"{size} bytes", f"{fix}, and {taken} are taken: split it, or wait for decisions")
        return size
