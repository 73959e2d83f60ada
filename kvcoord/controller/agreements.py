"""Votes about something of the engine's own, which kvcoord only tallies."""

from kvcoord.controller.consensus import Consensus
from kvcoord.controller.operations import Call
from kvcoord.controller.state import CacheState, outcome_of
from kvcoord.domain import OperationId, OperationKind, Path, Reason
from kvcoord.errors import UsageError
from kvcoord.protocol.local import Agree, Agreed
from kvcoord.protocol.messages import Decision, Vote


class Agreements:
    """Open votes of the engine's own, by operation, with the call that waits for the decision (None: a later step)."""

    def __init__(self) -> None:
        self._open: dict[OperationId, Call | None] = {}

    def propose(self, call: Agree, who: Call, state: CacheState, consensus: Consensus) -> None:
        """Puts one to the vote: with the next frame when `deferred`, else at once, which holds up a lockstep engine."""
        if call.operation in self._open or call.operation in state.operations:
            raise UsageError("operation", call.operation, "is open already: give every operation an id of its own")
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
