"""Broken variants of the protocol's machines on the side of a rank."""

from typing import Any, Final

import msgspec

from kvcoord.controller.worker import WorkerMachine
from kvcoord.domain import Outcome, Reason
from kvcoord.protocol.effects import Apply
from kvcoord.protocol.messages import Decision
from kvcoord.protocol.rank import RankMachine
from kvcoord.protocol.rank_membership import RankState
from kvcoord.protocol.rank_rounds import RankRounds
from kvcoord.protocol.rank_stream import RankStream
from kvcoord.protocol.stream import StreamTable
from kvcoord.simulation.nodes import RankNode
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.scopes import Scope
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import Patch, Variant

_STREAMING: Final = Options(ranks=3, steps=24, fault_s=10.0, lockstep=False)
_OLD: Final = Options(
    ranks=3, lockstep=False, faults=16, fault_kinds=("delay", "reorder", "repeat", "restart_engine", "pause_rank")
)
_LOCKSTEP: Final = Options(ranks=3, steps=24, fault_s=10.0, lockstep=True)


def _rank_times_out_alone() -> list[Patch]:
    original = RankMachine.tick

    def tick(self: Any, now: float) -> Any:
        effects = original(self, now)
        for operation, (_, at) in list(self.stream._votes.items()):
            if at + 0.4 <= now and self.active:
                del self.stream._votes[operation]
                effects.append(Apply(Decision(operation, Outcome.ABORT, 0, None, Reason.VOTE_TIMEOUT, 0)))
        return effects

    return [(RankMachine, "tick", tick)]


def _old_decisions_are_taken() -> list[Patch]:
    original = RankMachine._entry

    def entry(self: Any, message: Any) -> Any:
        state, self.membership.state = self.membership.state, RankState.ACTIVE
        try:
            return original(self, msgspec.structs.replace(message, epoch=self.epoch))
        finally:
            self.membership.state = state

    return [(RankMachine, "_entry", entry)]


def _gaps_are_ignored() -> list[Patch]:
    original = RankStream.take

    def take(self: Any, entry: Any) -> bool:
        if entry.sequence > self.sequence:
            self.sequence = entry.sequence - 1
        return original(self, entry)

    return [(RankStream, "take", take)]


def _stays_with_two_coordinators() -> list[Patch]:
    """A rank that has said Hello elsewhere still takes what its old coordinator decides."""

    def any_connection(self: Any, peer: bytes) -> bool:
        return True

    return [
        *_old_decisions_are_taken(),
        (RankNode, "is_current", any_connection),
        (SimulatedRank, "is_current", any_connection),
    ]


def _applies_verdicts_on_arrival() -> list[Patch]:
    original = RankRounds.due

    def due(self: Any, step: int) -> Any:
        at = original(self, step)
        return at if at is None or self.last_verdict < at else self.last_verdict

    return [(RankRounds, "due", due)]


def _forgets_votes_of_closed_rounds() -> list[Patch]:
    original = RankRounds.frame

    def frame(self: Any, *arguments: Any) -> Any:
        if self._votes and self.last_frame % 3 == 2:
            self._votes = []
        return original(self, *arguments)

    return [(RankRounds, "frame", frame)]


def _votes_change() -> list[Patch]:
    original = RankStream.overdue_votes

    def overdue_votes(self: Any, now: float, retry_s: float) -> Any:
        votes = original(self, now, retry_s)
        return [msgspec.structs.replace(vote, yes=False, reason=Reason.BUSY) for vote in votes]

    return [(RankStream, "overdue_votes", overdue_votes)]


def _lost_votes_stay_lost() -> list[Patch]:
    def overdue_votes(self: Any, now: float, retry_s: float) -> list[Any]:
        return []

    def expire(self: Any, now: float) -> list[Any]:
        return []

    def deadline(self: Any) -> None:
        return None

    return [
        (RankStream, "overdue_votes", overdue_votes),
        (StreamTable, "expire", expire),
        (StreamTable, "deadline", deadline),
    ]


def _reasons_of_ones_own() -> list[Patch]:
    original = WorkerMachine._decide

    def decide(self: Any, decision: Any, path: Any) -> None:
        if decision.reason is Reason.VOTE_TIMEOUT and self.rank.identity.rank == 0:
            decision = msgspec.structs.replace(decision, reason=Reason.BUSY)
        original(self, decision, path)

    return [(WorkerMachine, "_decide", decide)]


RANK_VARIANTS: Final = (
    Variant(name="local_timeout_decides", breaks="a rank that has voted gives up alone", make=_rank_times_out_alone),
    Variant(
        name="old_decision_taken",
        breaks="a rank takes decisions of an old epoch",
        make=_old_decisions_are_taken,
        options=_OLD,
    ),
    Variant(name="gap_ignored", breaks="a gap in the sequence is skipped", make=_gaps_are_ignored, options=_STREAMING),
    Variant(
        name="two_coordinators",
        breaks="a rank that has moved on still takes its old coordinator's decisions",
        make=_stays_with_two_coordinators,
        scope=Scope(name="two changes of coordinator", coordinators=2, suspect=2),
    ),
    Variant(
        name="verdict_on_arrival",
        breaks="a verdict is applied when it comes, not at its step",
        make=_applies_verdicts_on_arrival,
        options=_LOCKSTEP,
    ),
    Variant(
        name="deferred_votes_lost",
        breaks="votes that wait for a frame are dropped now and then",
        make=_forgets_votes_of_closed_rounds,
        options=_LOCKSTEP,
    ),
    Variant(name="vote_changes", breaks="a vote that is said again says no", make=_votes_change),
    Variant(
        name="vote_never_repeated",
        breaks="a lost vote is not said again and has no deadline",
        make=_lost_votes_stay_lost,
        options=_STREAMING,
    ),
    Variant(
        name="reason_of_ones_own",
        breaks="one rank tells its engine another reason for an abort than the others",
        make=_reasons_of_ones_own,
        options=_STREAMING,
    ),
)
