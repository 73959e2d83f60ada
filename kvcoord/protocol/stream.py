"""Decisions that do not wait for a round, on the coordinator: ballots with deadlines, and the dense sequence.

The log keeps the last entries so that a rank with a gap, or one that votes again, gets the same answer again.
"""

from collections import OrderedDict, deque
from typing import Final

import msgspec

from kvcoord.domain import COPYING_KINDS, Agreement, OperationId, OperationKind, Outcome, PoolName, Rank, Reason
from kvcoord.protocol.ballot import RECORDED, Ballot, Tally
from kvcoord.protocol.messages import Completion, Decision, Entry, Vote
from kvcoord.protocol.transfers import TransferTable

_ALL: Final = Agreement.ALL
_COMMIT: Final = Outcome.COMMIT


class _Open:
    __slots__ = ("ballot", "deadline")

    def __init__(self, ballot: Ballot, deadline: float) -> None:
        self.ballot, self.deadline = ballot, deadline


class StreamTable:
    """Open ballots and the sequence of one group. Every entry that is returned has been numbered and logged.

    Every ballot has the same timeout and `now` never goes back, so they are opened in order of their deadlines: `open`
    has them by operation, for whoever wants to know whether there is one.
    """

    def __init__(
        self,
        everyone: int,
        transfers: TransferTable,
        vote_timeout_s: float,
        operations_open_max: int,
        entries_kept_max: int,
    ) -> None:
        self._everyone = everyone
        self._transfers = transfers
        self._vote_timeout_s = vote_timeout_s
        self._open_max = operations_open_max
        self.open: OrderedDict[OperationId, _Open] = OrderedDict()
        self._log: deque[Entry] = deque(maxlen=entries_kept_max)
        self._decided: OrderedDict[OperationId, Decision] = OrderedDict()
        self._decided_max = entries_kept_max
        self.sequence = 0
        self.ignored: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.open)

    def decided(self, operation: OperationId) -> Decision | None:
        """The decision of an operation that ended lately."""
        return self._decided.get(operation)

    def vote(self, rank: Rank, vote: Vote, now: float) -> Decision | None:
        """Counts one vote. Returns the decision it brought about, or None.

        The first no decides; the last yes decides. Beyond `operations_open_max` undecided or copying operations the
        answer is ABORT(limit).
        """
        if vote.operation in self._decided:
            self._count("vote_after_decision")
            return None
        entry = self.open.get(vote.operation)
        if entry is None:
            ballot = Ballot(vote, self._everyone)
            if not ballot.participants >> rank & 1:
                self._count(f"vote_{Tally.NOT_PARTICIPANT.value}")
                return None
            if len(self.open) + len(self._transfers) >= self._open_max:
                return self.abort(vote.operation, Reason.LIMIT, rank)
            entry = self.open[vote.operation] = _Open(ballot, now + self._vote_timeout_s)
        ballot = entry.ballot
        tally = ballot.record(rank, vote)
        if tally is not RECORDED:
            self._count(f"vote_{tally.value}")
            return None
        if ballot.refused:
            return self.abort(vote.operation, *ballot.blame())
        if not ballot.complete:
            return None
        if ballot.kind in COPYING_KINDS:
            self._transfers.expect(vote.operation, ballot.participants, now)
        value = None if ballot.agreement is _ALL else ballot.value
        return self._log_decision(Decision(vote.operation, _COMMIT, self.sequence + 1, value))

    def expire(self, now: float) -> list[Decision]:
        """ABORT(vote_timeout) for ballots whose deadline has passed, naming the first rank that did not vote."""
        decisions = []
        while self.open:
            operation, entry = next(iter(self.open.items()))
            if entry.deadline > now:
                break
            decisions.append(self.abort(operation, Reason.VOTE_TIMEOUT, entry.ballot.missing()[0]))
        return decisions

    def abort_all(self, reason: Reason, rank: Rank) -> list[Decision]:
        """ABORT for everything open."""
        return [self.abort(operation, reason, rank) for operation in list(self.open)]

    def abort(
        self, operation: OperationId, reason: Reason, rank: Rank, shortfall: dict[PoolName, int] | None = None
    ) -> Decision:
        """ABORT for one operation, open here or only in doubt on some rank."""
        decision = Decision(operation, Outcome.ABORT, self.sequence + 1, None, reason, rank, shortfall or {})
        return self._log_decision(decision)

    def complete(self, completion: Completion) -> Completion:
        """Numbers a completion."""
        self.sequence += 1
        numbered = msgspec.structs.replace(completion, sequence=self.sequence)
        self._log.append(numbered)
        return numbered

    def reaches(self, sequence: int) -> bool:
        """Whether the log still has every entry after `sequence`."""
        return not self._log or self._log[0].sequence <= sequence + 1

    def votes_on(self, operation: OperationId, sequence: int) -> bool:
        """Whether a rank that has applied the entries up to `sequence` may vote on this operation, not decided here.

        It may not when a decision on it may have been forgotten: a second one would be made.
        """
        return operation in self.open or self.reaches(sequence)

    def after(self, sequence: int) -> list[Entry] | None:
        """Entries after `sequence`, or None when the log no longer reaches back so far."""
        if sequence >= self.sequence:
            return []
        if not self._log or not self.reaches(sequence):
            return None
        return [entry for entry in self._log if entry.sequence > sequence]

    def resume(self, entries: list[Entry], sequence: int) -> None:
        """Takes over what the ranks know: the merged recent entries and the last number any of them has."""
        self.open.clear()
        self._log.clear()
        self._decided.clear()
        self._log.extend(entries)
        for entry in entries:
            if isinstance(entry, Decision):
                self._remember(entry)
        self.sequence = sequence

    def deadline(self) -> float | None:
        """When the oldest open ballot expires."""
        return next(iter(self.open.values())).deadline if self.open else None

    def operations(self) -> list[tuple[OperationId, OperationKind, list[Rank]]]:
        """Open operations with the ranks that have not voted: for status pages."""
        return [(operation, entry.ballot.kind, entry.ballot.missing()) for operation, entry in self.open.items()]

    def _log_decision(self, decision: Decision) -> Decision:
        self.open.pop(decision.operation, None)
        self.sequence = decision.sequence
        self._log.append(decision)
        self._remember(decision)
        return decision

    def _remember(self, decision: Decision) -> None:
        self._decided[decision.operation] = decision
        if len(self._decided) > self._decided_max:
            self._decided.popitem(last=False)

    def _count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
