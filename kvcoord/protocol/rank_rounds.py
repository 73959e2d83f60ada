"""Rounds on a rank: frames that wait for their verdict, verdicts that wait for their step. DESIGN section 4.2.

A frame is never changed once it is built: after a change of coordinator the same frames go out in the new epoch.
"""

import msgspec

from kvcoord.domain import OperationId
from kvcoord.errors import UsageError
from kvcoord.protocol.messages import Ack, Frame, Verdict, Vote


class RankRounds:
    """One rank's frames and verdicts. At most `lag` rounds are open, which bounds everything here."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._open_max = max(lag, 1)
        self.first_round = -1
        self.last_frame = -1
        self.last_verdict = -1
        self.ignored: dict[str, int] = {}
        self._votes: list[Vote] = []
        self._acks: dict[OperationId, Ack] = {}
        self._undecided: dict[OperationId, Vote] = {}
        self._frames: dict[int, tuple[Frame, float]] = {}
        self._verdicts: dict[int, Verdict] = {}

    def defer(self, vote: Vote) -> None:
        """A vote for the next frame."""
        self._votes.append(vote)
        self._undecided[vote.operation] = vote

    def ack(self, ack: Ack) -> None:
        """An ack for the next frame."""
        self._acks[ack.operation] = ack

    def frame(self, epoch: int, round_number: int, free: list[int], digest: int, now: float) -> Frame:
        """Builds the frame of this step from what was said since the last one.

        Raises UsageError when steps do not follow each other (lockstep engines number them densely), and when this rank
        would be more than `lag` rounds ahead of the last verdict.
        """
        if round_number != self.last_frame + 1:
            self.check_follows(round_number)
        if len(self._frames) >= self._open_max:
            raise UsageError("step", round_number, f"lag={self.lag}: verdict {self.verdict_next} has to come first")
        if self.first_round < 0:
            self.first_round = round_number
        self.last_frame = round_number
        if round_number <= self.last_verdict:
            return self._frame_after_verdict(epoch, round_number, free, digest)
        first_round = self.first_round if self.last_verdict < 0 else -1
        votes, self._votes = self._votes, []
        acks = list(self._acks.values())
        if acks:
            self._acks.clear()
        frame = Frame(epoch, round_number, votes, acks, free, digest, first_round)
        self._frames[round_number] = (frame, now)
        return frame

    def check_follows(self, step: int) -> None:
        """Raises UsageError when this is not the step after the last one. To be asked before its verdict is applied."""
        if self.last_frame >= 0 and step != self.last_frame + 1:
            raise UsageError("step", step, f"steps follow each other: the next one is {self.last_frame + 1}")

    def _frame_after_verdict(self, epoch: int, round_number: int, free: list[int], digest: int) -> Frame:
        """A frame of a round that was closed without this rank, which has learned so from another rank's report.

        Only its digest matters any more, and nothing will answer it: what was said waits for the next frame.
        """
        decided = {decision.operation for decision in self._verdicts[round_number].decisions}
        self._votes = [vote for vote in self._votes if vote.operation not in decided]
        for operation in decided:
            self._undecided.pop(operation, None)
        return Frame(epoch, round_number, [], [], free, digest)

    def due(self, step: int) -> int | None:
        """The round whose verdict is applied at the start of `step`, None when there was none so long ago."""
        due = step - self.lag
        return due if 0 <= self.first_round <= due else None

    @property
    def verdict_next(self) -> int:
        """The round whose verdict is needed next, -1 when no frame was sent in this history."""
        return self.last_verdict + 1 if self.last_verdict >= 0 else self.first_round

    def take(self, verdict: Verdict) -> bool:
        """Keeps the next verdict. False: it is a repetition, not the next one, or nobody here has asked for it yet."""
        expected = self.verdict_next
        if expected < 0 or verdict.round != expected:
            self._count("verdict_repeated" if verdict.round < expected else "verdict_after_gap")
            return False
        self.last_verdict = verdict.round
        self._verdicts[verdict.round] = verdict
        self._frames.pop(verdict.round, None)
        for decision in verdict.decisions:
            self._undecided.pop(decision.operation, None)
        return True

    def verdict(self, round_number: int) -> Verdict | None:
        """The verdict of this round if it has come. Older ones than lag + 1 rounds before it are forgotten."""
        verdict = self._verdicts.get(round_number)
        if verdict is not None:
            while len(self._verdicts) > self.lag + 1:
                oldest = next(iter(self._verdicts))
                if oldest >= round_number - self.lag:
                    break
                del self._verdicts[oldest]
        return verdict

    def kept(self) -> list[Verdict]:
        """The last verdicts, for a report."""
        return list(self._verdicts.values())

    def resend(self, epoch: int, last_round: int, now: float) -> list[Frame]:
        """After a change of coordinator: every frame later than the last decided round, in the new epoch.

        Votes of earlier frames that no verdict has decided (their round was closed without this rank) go into the next.
        """
        for number in [number for number in self._frames if number <= last_round]:
            del self._frames[number]
        for number, (frame, _) in self._frames.items():
            self._frames[number] = (msgspec.structs.replace(frame, epoch=epoch), now)
        frames = [frame for frame, _ in self._frames.values()]
        waiting = {vote.operation for votes in (self._votes, *(frame.votes for frame in frames)) for vote in votes}
        self._votes += [vote for operation, vote in self._undecided.items() if operation not in waiting]
        return frames

    def overdue(self, now: float, retry_s: float) -> Frame | None:
        """The oldest frame without a verdict, when it was sent `retry_s` ago: its verdict may be lost."""
        for number, (frame, at) in self._frames.items():
            if at + retry_s > now:
                return None
            self._frames[number] = (frame, now)
            return frame
        return None

    def begin(self) -> None:
        """A new history: rounds start with the next frame."""
        self.first_round = self.last_frame = self.last_verdict = -1
        self._votes = []
        for held in (self._acks, self._undecided, self._frames):
            held.clear()
        self._verdicts.clear()

    def _count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
