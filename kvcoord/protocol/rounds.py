"""Rounds, on the coordinator: frames in, verdicts out. DESIGN section 4.2.

A verdict is a function of the frames up to its round and of the deadline. Votes of one operation travel in the same
round from every rank, since lockstep ranks issue the same operations at the same step; so a missing vote in a present
frame is already an ABORT(not_voted), and only a missing frame waits for the round's deadline.

A history begins with the round that the first rank to be heard began with. Ranks that begin with different rounds can
never close one together: `parting` says so, as soon as the second one is heard.
"""

from collections import deque
from typing import Final

import msgspec

from kvcoord.domain import COPYING_KINDS, Agreement, OperationId, OperationKind, Outcome, Rank, Reason
from kvcoord.durations import Durations
from kvcoord.protocol.ballot import RECORDED, Ballot, Tally, participants_of, ranks_in
from kvcoord.protocol.messages import Completion, Decision, Frame, Value, Verdict, Vote
from kvcoord.protocol.transfers import TransferTable

CLOSE_BOUNDS_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0)
"""From a loopback round to the default round timeout."""

_ALL: Final = Agreement.ALL
_COMMIT: Final = Outcome.COMMIT


class _Round:
    __slots__ = ("begun_at", "deadline", "frames", "present")

    def __init__(self, now: float, timeout_s: float) -> None:
        self.frames: dict[Rank, Frame] = {}
        self.present = 0
        self.begun_at = now
        self.deadline = now + timeout_s


class _Late:
    """A round that was closed without some ranks: digests so far, and operations that it or a late frame decided."""

    __slots__ = ("decided", "digests")

    def __init__(self, digests: dict[Rank, int], decided: set[OperationId]) -> None:
        self.digests = digests
        self.decided = decided


class RoundTable:
    """Open rounds of one group, and the last verdicts for those who ask again.

    `next_round` is None until the first frame of a history. `parting`: the first round of each rank that was heard,
    once they are known to differ.
    """

    def __init__(
        self,
        world_size: int,
        transfers: TransferTable,
        round_timeout_s: float,
        rounds_kept_max: int,
        operations_open_max: int = 4096,
    ) -> None:
        self._everyone = (1 << world_size) - 1
        self._transfers = transfers
        self._timeout_s = round_timeout_s
        self._kept_max = rounds_kept_max
        self._copying_max = operations_open_max
        self._open: dict[int, _Round] = {}
        self._kept: deque[Verdict] = deque(maxlen=rounds_kept_max)
        self._late_rounds: dict[int, _Late] = {}
        self._late_decisions: list[Decision] = []
        self._first_rounds: dict[Rank, int] = {}
        self.next_round: int | None = None
        self.pending: list[Completion] = []
        self.parting: dict[Rank, int] = {}
        self.close_times = Durations(CLOSE_BOUNDS_S)
        """From the first frame of a round to its verdict."""
        self.ignored: dict[str, int] = {}

    def resume(self, epoch: int, last_round: int, verdicts: list[Verdict]) -> None:
        """Goes on after `last_round`; -1 for none, the frames then say which is first. Kept verdicts are renewed."""
        self._open.clear()
        self._late_rounds.clear()
        self._late_decisions.clear()
        self.pending.clear()
        self.parting = {}
        renewed = (msgspec.structs.replace(verdict, epoch=epoch) for verdict in verdicts)
        self._kept = deque(renewed, maxlen=self._kept_max)
        self._first_rounds.clear()
        self.next_round = None if last_round < 0 else last_round + 1

    def frame(self, rank: Rank, frame: Frame, now: float) -> bool:
        """Takes one frame. Returns whether a round can close now. Of a closed round's frame only the acks count."""
        number = frame.round
        if self.next_round is None or self._first_rounds:
            self._begin(rank, frame)
        assert self.next_round is not None
        if number < self.next_round:
            self._late(rank, frame, now)
            return False
        entry = self._open.get(number)
        if entry is None:
            if len(self._open) >= self._kept_max and number != self.next_round:
                self._count("frame_too_far_ahead")
                return False
            entry = self._open[number] = _Round(now, self._timeout_s)
        bit = 1 << rank
        if entry.present & bit:
            self._count("frame_duplicate")
            return False
        entry.frames[rank] = frame
        entry.present |= bit
        return number == self.next_round and entry.present == self._everyone

    def _begin(self, rank: Rank, frame: Frame) -> None:
        """Where this rank says that the history began."""
        first = frame.first_round
        if self.next_round is None:
            first = self.next_round = first if first >= 0 else frame.round
        if first >= 0 and rank not in self._first_rounds:
            self._first_rounds[rank] = first
            if self.parting or len(set(self._first_rounds.values())) > 1:
                self.parting = dict(self._first_rounds)

    def close_ready(self, epoch: int, now: float) -> list[tuple[Verdict, dict[Rank, int]]]:
        """Closes rounds in order while they are complete or past their deadline: (verdict, digest by rank) each."""
        closed = []
        while self.next_round is not None:
            entry = self._open.get(self.next_round)
            if entry is None or (entry.present != self._everyone and entry.deadline > now):
                break
            closed.append(self._close(self.next_round, entry, epoch, now))
        return closed

    def verdict(self, round_number: int) -> Verdict | None:
        """A verdict that is still kept."""
        for verdict in reversed(self._kept):
            if verdict.round == round_number:
                return verdict
        return None

    def late_digests(self, round_number: int) -> dict[Rank, int] | None:
        """All digests of a round that was closed without some ranks, once they are complete."""
        late = self._late_rounds.get(round_number)
        if late is None or len(late.digests) != self._everyone.bit_count():
            return None
        return self._late_rounds.pop(round_number).digests

    def missing(self) -> list[Rank]:
        """Ranks whose frame the next round lacks, when some frame of it is there."""
        entry = self._open.get(self.next_round) if self.next_round is not None else None
        return ranks_in(self._everyone & ~entry.present) if entry else []

    def deadline(self) -> float | None:
        entry = self._open.get(self.next_round) if self.next_round is not None else None
        return entry.deadline if entry else None

    def _close(self, number: int, entry: _Round, epoch: int, now: float) -> tuple[Verdict, dict[Rank, int]]:
        absent = ranks_in(self._everyone & ~entry.present)
        frames = [(rank, entry.frames[rank]) for rank in sorted(entry.frames)]
        decisions = self._decide(frames, absent, now)
        completions = self.pending
        self.pending = []
        for rank, frame in frames:
            for ack in frame.acks:
                completion = self._transfers.record(rank, ack, now)
                if completion is not None:
                    completions.append(completion)
        if absent:
            capacity = [0] * len(frames[0][1].free)
        else:
            capacity = [min(counts) for counts in zip(*(frame.free for _, frame in frames), strict=True)]
        verdict = Verdict(epoch, number, decisions, completions, capacity, absent)
        del self._open[number]
        self._kept.append(verdict)
        self.close_times.observe(now - entry.begun_at)
        self.next_round = number + 1
        digests = {rank: frame.digest for rank, frame in frames}
        if absent:
            self._late_rounds[number] = _Late(dict(digests), {decision.operation for decision in decisions})
            if len(self._late_rounds) > self._kept_max:
                del self._late_rounds[min(self._late_rounds)]
        return verdict, digests

    def _decide(self, frames: list[tuple[Rank, Frame]], absent: list[Rank], now: float) -> list[Decision]:
        decisions, self._late_decisions = self._late_decisions, []
        late = {decision.operation for decision in decisions}
        votes = None if absent else self._alike(frames)
        if votes is not None:
            for vote in votes:
                if vote.operation not in late:
                    decisions.append(self._commit(vote.operation, vote.kind, self._everyone, None, now))
            return decisions
        for operation, ballot in self._ballots(frames).items():
            if operation not in late:
                decisions.append(self._settle(operation, ballot, absent, now))
        return decisions

    def _alike(self, frames: list[tuple[Rank, Frame]]) -> list[Vote] | None:
        """The votes of a round in which all ranks say yes to the same operations in the same words, else None.

        Nearly all rounds are like this, and comparing lists costs a tenth of counting ballots.
        """
        votes = frames[0][1].votes
        for _, frame in frames:
            if frame.votes != votes:
                return None
        for vote in votes:
            if not vote.yes or vote.agreement is not _ALL:
                return None
            if vote.participants and participants_of(vote.participants, self._everyone) != self._everyone:
                return None
        return votes if len({vote.operation for vote in votes}) == len(votes) else None

    def _ballots(self, frames: list[tuple[Rank, Frame]]) -> dict[OperationId, Ballot]:
        """The votes of a round, counted by operation."""
        ballots: dict[OperationId, Ballot] = {}
        for rank, frame in frames:
            for vote in frame.votes:
                ballot = ballots.get(vote.operation)
                if ballot is None:
                    if not participants_of(vote.participants, self._everyone) >> rank & 1:
                        self._count(f"vote_{Tally.NOT_PARTICIPANT.value}")
                        continue
                    ballot = ballots[vote.operation] = Ballot(vote, self._everyone)
                tally = ballot.record(rank, vote)
                if tally is not RECORDED:
                    self._count(f"vote_{tally.value}")
        return ballots

    def _settle(self, operation: OperationId, ballot: Ballot, absent: list[Rank], now: float) -> Decision:
        if ballot.refused:
            reason, rank, shortfall = ballot.blame()
            return Decision(operation, Outcome.ABORT, 0, None, reason, rank, shortfall)
        if not ballot.complete:
            missing = ballot.missing()
            late = [rank for rank in missing if rank in absent]
            reason = Reason.VOTE_TIMEOUT if late else Reason.NOT_VOTED
            return Decision(operation, Outcome.ABORT, 0, None, reason, (late or missing)[0])
        value = None if ballot.agreement is _ALL else ballot.value
        return self._commit(operation, ballot.kind, ballot.participants, value, now)

    def _commit(
        self, operation: OperationId, kind: OperationKind, participants: int, value: Value, now: float
    ) -> Decision:
        """All participants can: COMMIT, unless too many copies are open already."""
        if kind in COPYING_KINDS:
            if len(self._transfers) >= self._copying_max:
                return Decision(operation, Outcome.ABORT, 0, None, Reason.LIMIT)
            self._transfers.expect(operation, participants, now)
        return Decision(operation, _COMMIT, 0, value)

    def _late(self, rank: Rank, frame: Frame, now: float) -> None:
        """A frame of a closed round. Votes that only this rank has put are answered by the next verdict."""
        for ack in frame.acks:
            completion = self._transfers.record(rank, ack, now)
            if completion is not None:
                self.pending.append(completion)
        late = self._late_rounds.get(frame.round)
        if late is None or rank in late.digests:
            self._count("frame_of_closed_round")
            return
        late.digests[rank] = frame.digest
        for vote in frame.votes:
            if vote.operation not in late.decided:
                late.decided.add(vote.operation)
                aborted = Decision(vote.operation, Outcome.ABORT, 0, None, Reason.VOTE_TIMEOUT, rank)
                self._late_decisions.append(aborted)

    def _count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
