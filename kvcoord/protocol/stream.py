"""Decisions that do not wait for a round, on the coordinator: ballots with deadlines, and the dense sequence.

The log keeps the last entries so that a rank with a gap, or one that votes again, gets the same answer again.
"""

from collections import OrderedDict, deque

from kvcoord.domain import Agreement, OperationId, OperationKind, Outcome, Rank, Reason
from kvcoord.protocol.ballot import Ballot, Tally
from kvcoord.protocol.messages import Completion, Decision, Entry, Vote


class _Open:
    __slots__ = ("ballot", "deadline", "kind")

    def __init__(self, ballot: Ballot, kind: OperationKind, deadline: float) -> None:
        self.ballot, self.kind, self.deadline = ballot, kind, deadline


class StreamTable:
    """Open ballots and the sequence of one group. Every entry that is returned has been numbered and logged."""

    def __init__(self, everyone: int, vote_timeout_s: float, operations_open_max: int, entries_kept_max: int) -> None:
        self._everyone = everyone
        self._vote_timeout_s = vote_timeout_s
        self._open_max = operations_open_max
        self._open: OrderedDict[OperationId, _Open] = OrderedDict()
        self._log: deque[Entry] = deque(maxlen=entries_kept_max)
        self._decided: OrderedDict[OperationId, Decision] = OrderedDict()
        self._decided_max = entries_kept_max
        self.sequence = 0
        self.ignored: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def decided(self, operation: OperationId) -> Decision | None:
        """The decision of an operation that ended lately."""
        return self._decided.get(operation)

    def participants(self, vote: Vote) -> int:
        return (vote.participants & self._everyone) or self._everyone

    def vote(self, rank: Rank, vote: Vote, now: float) -> tuple[Decision, int] | None:
        """Counts one vote. Returns the decision it brought about, with the participants, or None.

        The first no decides; the last yes decides. Beyond `operations_open_max` the answer is ABORT(limit).
        """
        if vote.operation in self._decided:
            self._count("vote_after_decision")
            return None
        entry = self._open.get(vote.operation)
        if entry is None:
            participants = self.participants(vote)
            if len(self._open) >= self._open_max:
                return self._decide(vote.operation, Outcome.ABORT, participants, reason=Reason.LIMIT, rank=rank)
            entry = _Open(Ballot(vote.agreement, participants), vote.kind, now + self._vote_timeout_s)
            self._open[vote.operation] = entry
        ballot = entry.ballot
        tally = ballot.record(rank, vote)
        if tally is not Tally.RECORDED:
            self._count(f"vote_{tally.value}")
            return None
        if ballot.refused:
            return self._abort_refused(vote.operation, ballot)
        if not ballot.complete:
            return None
        del self._open[vote.operation]
        return self._commit(vote.operation, ballot)

    def expire(self, now: float) -> list[Decision]:
        """ABORT(vote_timeout) for ballots whose deadline has passed, naming the first rank that did not vote."""
        decisions = []
        while self._open:
            operation, entry = next(iter(self._open.items()))
            if entry.deadline > now:
                break
            missing = entry.ballot.missing()[0]
            decision, _ = self._decide(
                operation, Outcome.ABORT, entry.ballot.participants, reason=Reason.VOTE_TIMEOUT, rank=missing
            )
            decisions.append(decision)
        return decisions

    def abort_all(self, reason: Reason, rank: Rank) -> list[Decision]:
        """ABORT for everything open."""
        return [self.abort(operation, reason, rank) for operation in list(self._open)]

    def abort(self, operation: OperationId, reason: Reason, rank: Rank) -> Decision:
        """ABORT for one operation, open here or only in doubt on some rank."""
        entry = self._open.get(operation)
        participants = entry.ballot.participants if entry else self._everyone
        return self._decide(operation, Outcome.ABORT, participants, reason=reason, rank=rank)[0]

    def complete(self, completion: Completion) -> Completion:
        """Numbers a completion."""
        self.sequence += 1
        numbered = Completion(completion.operation, completion.ok, self.sequence, completion.reason, completion.rank)
        self._log.append(numbered)
        return numbered

    def after(self, sequence: int) -> list[Entry] | None:
        """Entries after `sequence`, or None when the log no longer reaches back so far."""
        if sequence >= self.sequence:
            return []
        if not self._log or self._log[0].sequence > sequence + 1:
            return None
        return [entry for entry in self._log if entry.sequence > sequence]

    def resume(self, entries: list[Entry], sequence: int) -> None:
        """Takes over what the ranks know: the merged recent entries and the last number any of them has."""
        self._open.clear()
        self._log.clear()
        self._decided.clear()
        self._log.extend(entries)
        for entry in entries:
            if isinstance(entry, Decision):
                self._remember(entry)
        self.sequence = sequence

    def deadline(self) -> float | None:
        """When the oldest open ballot expires."""
        return next(iter(self._open.values())).deadline if self._open else None

    def operations(self) -> list[tuple[OperationId, OperationKind, list[Rank]]]:
        """Open operations with the ranks that have not voted: for status pages."""
        return [(operation, entry.kind, entry.ballot.missing()) for operation, entry in self._open.items()]

    def _abort_refused(self, operation: OperationId, ballot: Ballot) -> tuple[Decision, int]:
        reason, blamed, shortfall = ballot.blame()
        return self._decide(
            operation, Outcome.ABORT, ballot.participants, reason=reason, rank=blamed, shortfall=shortfall
        )

    def _commit(self, operation: OperationId, ballot: Ballot) -> tuple[Decision, int]:
        value = None if ballot.agreement is Agreement.ALL else ballot.value
        self.sequence += 1
        decision = Decision(operation, Outcome.COMMIT, self.sequence, value)
        self._log.append(decision)
        self._remember(decision)
        return decision, ballot.participants

    def _decide(
        self,
        operation: OperationId,
        outcome: Outcome,
        participants: int,
        *,
        reason: Reason,
        rank: Rank,
        shortfall: dict[str, int] | None = None,
    ) -> tuple[Decision, int]:
        self._open.pop(operation, None)
        self.sequence += 1
        decision = Decision(operation, outcome, self.sequence, None, reason, rank, shortfall or {})
        self._log.append(decision)
        self._remember(decision)
        return decision, participants

    def _remember(self, decision: Decision) -> None:
        self._decided[decision.operation] = decision
        if len(self._decided) > self._decided_max:
            self._decided.popitem(last=False)

    def _count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
