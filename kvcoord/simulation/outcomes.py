"""Promises about outcomes: Agreement, Validity, Order, Blame."""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvcoord.domain import Aborted, Agreement, Committed, OperationId, Outcome, Path, Reason, Tier
from kvcoord.protocol.ballot import participants_of, ranks_in
from kvcoord.protocol.local import Advanced, Answer, Call, Failed
from kvcoord.protocol.local import Outcome as AnyOutcome
from kvcoord.protocol.messages import Frame, StreamVote, Value, Vote
from kvcoord.simulation.promise import Observed, Promise
from kvcoord.simulation.rank import ANSWER_DELAY_S, SimulatedRank
from kvcoord.simulation.surroundings import Where

_FULL: Final = (Reason.HOST_FULL, Reason.DEVICE_FULL, Reason.AUXILIARY_FULL)

_EVENTS_BETWEEN_DIGESTS: Final = 8

_NOBODY: Final = (Reason.LIMIT, Reason.IN_DOUBT, Reason.COORDINATOR_LOST)
"""Aborts for which no rank is to blame."""

_WITHOUT_GROUP: Final = (Reason.RANK_LOST, Reason.COORDINATOR_LOST)
"""Why a rank without lockstep may answer alone."""

_BY_FAULT: Final = (
    Reason.RANK_LOST,
    Reason.COORDINATOR_LOST,
    Reason.IN_DOUBT,
    Reason.NOT_VOTED,
    Reason.CONFLICTING_VOTES,
)
"""Aborts that cannot be where nothing goes wrong."""

_OWN_MATTERS: Final = {"slots": [], "error": ""}
"""What the answers of two ranks at one point may differ in."""


def outcomes_of(answer: Answer) -> Iterator[AnyOutcome]:
    """Every outcome that an answer tells."""
    if isinstance(answer, Advanced):
        yield from answer.outcomes
        return
    outcome = getattr(answer, "outcome", None)
    if outcome is not None:
        yield outcome


class AgreementPromise(Promise):
    """No two ranks of an epoch apply different outcomes or values for one operation.

    Whatever is told is the group's word and the same for all, to the reason, the rank that is blamed and the shortfall.
    There are two exceptions, both without lockstep, and both of aborts alone. A rank may abort for itself, while it is
    without its group and where it has too many operations open: it has then not voted, so nobody commits. And one that
    comes to an operation when `decisions_kept_max` others have been decided since may hear another reason.
    """

    name = "agreement"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self.outcomes: dict[tuple[int, OperationId], tuple[AnyOutcome, str]] = {}
        """What the group decided, and who was told first."""
        self._alone: dict[tuple[int, OperationId], tuple[AnyOutcome, str]] = {}
        self._apart_at: dict[int, float] = {}
        """When each rank was last seen to do something without its group."""
        self._decided_at: dict[tuple[int, OperationId], int] = {}
        self._forgotten: set[tuple[int, OperationId]] = set()

    def after_rank(self, rank: SimulatedRank) -> None:
        if not rank.machine.active:
            self._apart_at[rank.number] = self.world.agenda.now

    def event(self, rank: SimulatedRank, history: int, index: int, text: str) -> None:
        """A second decision on one operation is made only when the first one is forgotten."""
        verb, _, rest = text.partition(" ")
        if verb not in (Outcome.COMMIT, Outcome.ABORT):
            return
        key = (history, rest.partition(" ")[0])
        first = self._decided_at.setdefault(key, index)
        if index == first:
            return
        if self.world.shape.group.lockstep or abs(index - first) < self.world.shape.limits.decisions_kept_max:
            raise self.broken(f"{rank.name}: event {index} decides {key[1]}, as event {first} did", key[1])
        self._forgotten.add(key)

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        for outcome in map(_without_own_rank, outcomes_of(answer)):
            key = (where[0], outcome.operation)
            told = self._alone if self._is_alone(rank, outcome) else self.outcomes
            held, by = told.setdefault(key, (outcome, rank.name))
            if held != outcome and told is self.outcomes:
                self._differs(key, held, by, outcome, rank)
            if key in self._alone and key in self.outcomes and isinstance(self.outcomes[key][0], Committed):
                (committed, by), (aborted, other) = self.outcomes[key], self._alone[key]
                raise self.broken(f"{by} was told {committed}, {other} {aborted}", outcome.operation)

    def failed(self, rank: SimulatedRank, call: Call, failure: Failed) -> None:
        if failure.error == "Diverged":
            raise self.broken(f"{rank.name} was told that the group diverged: {failure.fields}")

    def _differs(
        self, key: tuple[int, OperationId], held: AnyOutcome, by: str, outcome: AnyOutcome, rank: SimulatedRank
    ) -> None:
        if key not in self._forgotten or isinstance(held, Committed) or isinstance(outcome, Committed):
            raise self.broken(f"{by} was told {held}, {rank.name} {outcome}", key[1])

    def _is_alone(self, rank: SimulatedRank, outcome: AnyOutcome) -> bool:
        if self.world.shape.group.lockstep or isinstance(outcome, Committed):
            return False
        if outcome.reason is Reason.LIMIT and outcome.rank == rank.number:
            return True
        apart_s = self.world.agenda.now - self._apart_at.get(rank.number, -1.0)
        return outcome.reason in _WITHOUT_GROUP and apart_s <= 2 * ANSWER_DELAY_S


class Validity(Promise):
    """COMMIT only if every participant voted yes or the ledger covered it; all yes and no fault: COMMIT."""

    name = "validity"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self._votes: dict[tuple[int, OperationId], dict[int, Vote]] = {}
        self._seen: set[tuple[int, OperationId]] = set()

    def sent(self, rank: SimulatedRank, message: msgspec.Struct) -> None:
        if isinstance(message, StreamVote):
            self._said(rank, message.vote)
        elif isinstance(message, Frame):
            for vote in message.votes:
                self._said(rank, vote)

    def _said(self, rank: SimulatedRank, vote: Vote) -> None:
        key = (rank.machine.history, vote.operation)
        held = self._votes.setdefault(key, {}).setdefault(rank.number, vote)
        if held != vote:
            raise self.broken(f"{rank.name} voted {held} and then {vote}", vote.operation)

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        for outcome in outcomes_of(answer):
            key = (where[0], outcome.operation)
            if outcome.path is Path.COVERED or key in self._seen:
                continue
            self._seen.add(key)
            votes = self._votes.get(key, {})
            if isinstance(outcome, Committed):
                self._check_commit(outcome, votes)
            elif self.world.faultless and outcome.reason in _BY_FAULT:
                raise self.broken(f"nothing went wrong, and yet {outcome}", outcome.operation)

    def _check_commit(self, outcome: Committed, votes: dict[int, Vote]) -> None:
        everyone = (1 << self.world.shape.ranks) - 1
        first = next(iter(votes.values()), None)
        if first is None:
            raise self.broken(f"{outcome.operation} committed without a vote", outcome.operation)
        members = ranks_in(participants_of(first.participants, everyone))
        for member in members:
            vote = votes.get(member)
            if vote is None or not vote.yes:
                raise self.broken(
                    f"{outcome.operation} committed although rank {member} voted {vote and 'no'}", outcome.operation
                )
        expected = combined(first.agreement, [votes[member].value for member in members])
        if outcome.value != expected:
            raise self.broken(f"{outcome.operation} has value {outcome.value}, not {expected}", outcome.operation)


class Order(Promise):
    """The same sequence on all ranks; in rounds, the same round."""

    name = "order"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self._events: dict[int, list[str]] = {}
        self._answers: dict[Where, tuple[Answer, str]] = {}
        self._pages_by_digest: dict[int, tuple[int, ...]] = {}
        self._seen = 0

    def event(self, rank: SimulatedRank, history: int, index: int, text: str) -> None:
        events = self._events.setdefault(history, [])
        if index == len(events):
            events.append(text)
        elif index > len(events) or events[index] != text:
            before = events[index] if index < len(events) else "nothing"
            operation = text.split()[1] if len(text.split()) > 1 else ""
            raise self.broken(f"event {index} is {text!r} on {rank.name}, and was {before!r} elsewhere", operation)

    def after_rank(self, rank: SimulatedRank) -> None:
        """Indexes that differ have digests that differ, or no comparison would show it."""
        self._seen += 1
        if self._seen % _EVENTS_BETWEEN_DIGESTS:
            return
        tree = rank.worker.cache.state.tree
        pages = tuple([count for tier in Tier for count in (tree.pages(tier), *tree.tails.counts(tier))])
        if self._pages_by_digest.setdefault(tree.digest, pages) != pages:
            raise self.broken(f"{rank.name}: one digest for {self._pages_by_digest[tree.digest]} and {pages} pages")

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        if where[1] < 0:
            return
        if isinstance(answer, Advanced) and answer.round not in (-1, answer.step - self.world.shape.group.lag):
            raise self.broken(f"{rank.name} applied round {answer.round} at step {answer.step}")
        common = _common(answer)
        held, by = self._answers.setdefault(where, (common, rank.name))
        if held != common:
            raise self.broken(f"at step {where[1]} {by} was told {held}, {rank.name} {common}", _operation_of(answer))


class Blame(Promise):
    """Every ABORT, retraction and divergence names rank, operation, reason and shortfall."""

    name = "blame"

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        for outcome in outcomes_of(answer):
            if isinstance(outcome, Aborted):
                self._check(outcome)
        if isinstance(answer, Advanced):
            for operation, reason, blamed in answer.retracted:
                if blamed < 0:
                    raise self.broken(f"{operation} was retracted ({reason}) and no rank is named", operation)

    def _check(self, outcome: Aborted) -> None:
        if outcome.rank < 0 and outcome.path is not Path.COVERED and outcome.reason not in _NOBODY:
            raise self.broken(f"{outcome} names no rank", outcome.operation)
        if outcome.reason in _FULL and not (outcome.shortfall and min(outcome.shortfall.values()) > 0):
            raise self.broken(f"{outcome} does not say how short", outcome.operation)


def combined(agreement: Agreement, values: list[Value]) -> Value:
    """What an agreement makes of the values of all yes votes, said again in the plainest way."""
    if agreement is Agreement.ALL:
        return None
    if agreement is Agreement.INTERSECT:
        lists = [set(value) for value in values if isinstance(value, list)]
        return sorted(set.intersection(*lists))
    numbers = [value for value in values if isinstance(value, int)]
    return max(numbers) if agreement is Agreement.MAX else min(numbers)


def _without_own_rank(outcome: AnyOutcome) -> AnyOutcome:
    """Where all ranks are at a limit together, each names itself."""
    if isinstance(outcome, Aborted) and outcome.reason is Reason.LIMIT and outcome.path is Path.COVERED:
        return msgspec.structs.replace(outcome, rank=-1)
    return outcome


def _common(answer: Answer) -> Answer:
    fields: dict[str, object] = {name: value for name, value in _OWN_MATTERS.items() if hasattr(answer, name)}
    if isinstance(answer, Advanced):
        fields["outcomes"] = list(map(_without_own_rank, answer.outcomes))
    elif getattr(answer, "outcome", None) is not None:
        fields["outcome"] = _without_own_rank(next(outcomes_of(answer)))
    return msgspec.structs.replace(answer, **fields) if fields else answer


def _operation_of(answer: Answer) -> OperationId:
    return str(getattr(answer, "operation", ""))
