"""The rank side of the protocol. DESIGN sections 4.1 and 4.2.

The same machine runs in a sidecar worker and inside an engine that keeps its own pools. It knows nothing of pages: what
a vote is about is its owner's business. It never decides: a rank that has voted waits for the coordinator, for the next
coordinator, or for the group deadline.
"""

from collections.abc import Callable

from kvcoord.domain import OperationId, Rank, Reason
from kvcoord.protocol.effects import Activated, Apply, DivergenceSeen, LogWanted, RankEffect, SendUp, VerdictReady
from kvcoord.protocol.messages import (
    NO_EPOCH,
    Ack,
    Activate,
    Alive,
    Decision,
    Divergence,
    FetchEntries,
    FromCoordinator,
    Heartbeat,
    LogRequest,
    Numbered,
    OperationLog,
    Prepare,
    Refused,
    Rejoin,
    Report,
    StreamAck,
    StreamVote,
    Suspended,
    Verdict,
    Vote,
    Waiting,
)
from kvcoord.protocol.rank_attachment import RankLimits
from kvcoord.protocol.rank_membership import ACTIVE, Identity, RankMembership, RankState
from kvcoord.protocol.rank_rounds import RankRounds
from kvcoord.protocol.rank_stream import RankStream

__all__ = ["Identity", "RankLimits", "RankMachine", "RankState"]


class RankMachine:
    """One member of a group. `receive` takes the coordinator's messages, `tick` lets deadlines pass.

    `free_counts` is asked for the free pages per pool when the rank reports what it knows, `held` for the host pages
    that it could take into a new history.
    """

    def __init__(
        self,
        identity: Identity,
        coordinator_count: int,
        lag: int,
        limits: RankLimits,
        free_counts: Callable[[], list[int]],
        *,
        lockstep: bool,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        self.membership = RankMembership(identity, coordinator_count, limits, self._report)
        self.history = NO_EPOCH
        self.stream = RankStream(limits.decisions_kept_max, limits.report_bytes_max)
        self.rounds = RankRounds(lag)
        self.lockstep = lockstep
        self._free_counts = free_counts
        self._held = held
        self._retry_s = limits.heartbeat_interval_s
        self._fetched = -1

    @property
    def identity(self) -> Identity:
        return self.membership.identity

    @property
    def state(self) -> RankState:
        return self.membership.state

    @property
    def active(self) -> bool:
        """The group works."""
        return self.membership.active

    @property
    def epoch(self) -> int:
        """The last epoch accepted."""
        return self.membership.epoch

    @property
    def cause(self) -> str:
        """Why the group does not work, empty when it does."""
        return self.membership.cause

    @property
    def suspended_reason(self) -> Reason:
        """Why the group was suspended last, and `suspended_rank` because of whom (-1: the coordinator)."""
        return self.membership.suspended_reason

    @property
    def suspended_rank(self) -> Rank:
        return self.membership.suspended_rank

    @property
    def coordinator_index(self) -> int:
        """Which coordinator of the list this rank is attached to."""
        return self.membership.attachment.index

    @property
    def ignored(self) -> dict[str, int]:
        """Messages that changed nothing, by cause."""
        return self.membership.ignored

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[RankEffect]:
        """Attaches to the first coordinator of the list and says Hello."""
        return self.membership.start(now)

    def leave(self, now: float) -> list[RankEffect]:
        """Ends membership in good order."""
        return self.membership.leave()

    def gone(self, now: float) -> list[RankEffect]:
        """The transport says that the connection is gone."""
        return self.membership.gone(now)

    def absent(self, now: float) -> list[RankEffect]:
        """The transport says that nobody is at the coordinator's address."""
        return self.membership.absent(now)

    def begin_anew(self, reason: Reason, rank: Rank, cause: str, now: float) -> list[RankEffect]:
        """Joins again as one that knows nothing, so that the whole group begins a new history. `rank` is to blame."""
        self.history = NO_EPOCH
        return self.membership.join_again(reason, rank, cause, now)

    def tick(self, now: float) -> list[RankEffect]:
        """Lets every deadline up to `now` pass."""
        effects = self.membership.tick(now)
        if not self.active or not self.membership.attachment.beat_due(now):
            return effects
        self.membership.attachment.beaten(now)
        return [SendUp(Heartbeat(self.epoch, self.stream.sequence)), *self._overdue(now)]

    def deadline(self) -> float | None:
        """When `tick` has something to do, None for never."""
        return self.membership.deadline()

    # --- what the owner says --------------------------------------------------------------------------------------

    def vote(self, vote: Vote, now: float) -> list[RankEffect]:
        """A vote that is sent at once. The decision comes as an Apply, or is known already (`decided`).

        A second vote for one operation changes nothing. While the group is suspended a vote is kept: the next epoch
        aborts what was in doubt before it, and hears what was said later.
        """
        membership = self.membership
        if not self.stream.vote(vote, now) or not membership.active:
            return []
        return [SendUp(StreamVote(membership.epoch, vote, self.stream.sequence))]

    def decided(self, operation: OperationId) -> Decision | None:
        """The decision of a stream operation that has been applied lately."""
        return self.stream.decided(operation)

    def defer(self, vote: Vote) -> None:
        """A vote for the next frame."""
        self.rounds.defer(vote)

    def ack(self, ack: Ack, now: float) -> list[RankEffect]:
        """This rank's copy is over: told in the next frame in lockstep, at once otherwise."""
        if not self.stream.ack(ack, now):
            return []
        if self.lockstep:
            self.rounds.ack(ack)
            return []
        return [SendUp(StreamAck(self.epoch, ack, self.stream.sequence))] if self.active else []

    def frame(self, step: int, free: list[int], digest: int, now: float) -> list[RankEffect]:
        """Sends the frame of this step. While the group is suspended it is kept and sent at the next activation.

        Raises UsageError when the step is not the next one, or more than `lag` ahead of the last verdict.
        """
        membership = self.membership
        frame = self.rounds.frame(membership.epoch, step, free, digest, now)
        return [SendUp(frame)] if membership.state is ACTIVE else []

    def log(self, round_number: int, events: list[tuple[str, int]]) -> list[RankEffect]:
        """The answer to LogWanted."""
        return [SendUp(OperationLog(self.epoch, round_number, events))]

    # --- what the coordinator says --------------------------------------------------------------------------------

    def receive(self, message: FromCoordinator, now: float) -> list[RankEffect]:
        """One message from the coordinator this rank is attached to. Others' messages must not be passed in."""
        membership = self.membership
        if membership.ended:
            return []
        membership.attachment.heard(now)
        if type(message) is Numbered:
            return self._entry(message)
        if type(message) is Verdict:
            if not self.active or message.epoch != self.epoch:
                return self._ignore("stale_epoch")
            return self._take_verdict(message)
        if type(message) is Alive:
            return self._alive(message)
        if isinstance(message, Waiting):
            return membership.waiting(message)
        if isinstance(message, Refused):
            return membership.refused(message)
        if isinstance(message, Prepare):
            return membership.prepare(message, now)
        if isinstance(message, Activate):
            return self._activate(message, now) if membership.activate(message) else []
        if isinstance(message, Suspended):
            return membership.suspended(message, now)
        if isinstance(message, Rejoin):
            return membership.rejoin(now)
        return self._other(message)

    def _entry(self, message: Numbered) -> list[RankEffect]:
        membership = self.membership
        if not membership.active or message.epoch != membership.epoch:
            return self._ignore("stale_epoch")
        if self.stream.take(message.entry):
            return [Apply(message.entry)]
        held = self.stream.sequence
        if message.entry.sequence <= held or self._fetched == held:
            return []
        self._fetched = held
        return [SendUp(FetchEntries(self.epoch, held))]

    def _take_verdict(self, verdict: Verdict) -> list[RankEffect]:
        if not self.rounds.take(verdict):
            return []
        for completion in verdict.completions:
            self.stream.completed(completion)
        return [VerdictReady(verdict.round)]

    def _alive(self, alive: Alive) -> list[RankEffect]:
        effects: list[RankEffect] = []
        if alive.probe:
            epoch = self.epoch if self.active else NO_EPOCH
            effects.append(SendUp(Heartbeat(epoch, self.stream.sequence, alive.probe)))
        if self.active and alive.epoch == self.epoch and alive.sequence > self.stream.sequence:
            effects.append(SendUp(FetchEntries(self.epoch, self.stream.sequence)))
        return effects

    def _activate(self, activate: Activate, now: float) -> list[RankEffect]:
        self._fetched = -1
        fresh = activate.history != self.history
        if fresh:
            self.history = activate.history
            self.stream.begin()
            self.rounds.begin()
        effects: list[RankEffect] = [Activated(activate, fresh)]
        for entry in activate.entries:
            if self.stream.take(entry):
                effects.append(Apply(entry))
        for verdict in activate.verdicts:
            effects += self._take_verdict(verdict)
        if not fresh:
            effects += self._say_again(activate.round, now)
        return effects

    def _say_again(self, last_round: int, now: float) -> list[RankEffect]:
        """What the new coordinator has not heard: frames, acks, and votes that were put after the Accept."""
        votes = [SendUp(StreamVote(self.epoch, vote, self.stream.sequence)) for vote in self.stream.undecided()]
        frames = self.rounds.resend(self.epoch, last_round, now)
        told = {ack.operation for frame in frames for ack in frame.acks}
        effects: list[RankEffect] = [*votes, *(SendUp(frame) for frame in frames)]
        for ack in self.stream.unfinished():
            if ack.operation in told:
                continue
            if self.lockstep:
                self.rounds.ack(ack)
            else:
                effects.append(SendUp(StreamAck(self.epoch, ack, self.stream.sequence)))
        return effects

    def _other(self, message: FromCoordinator) -> list[RankEffect]:
        if isinstance(message, LogRequest) and message.epoch == self.epoch:
            return [LogWanted(message.round)]
        if isinstance(message, Divergence) and message.epoch == self.epoch:
            return [DivergenceSeen(message.round, message.sides, message.operation)]
        return self._ignore("unexpected")

    # --- small things ---------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        return Report(
            self.history,
            self.stream.sequence,
            self.stream.kept(),
            self.stream.in_doubt(),
            self.rounds.kept(),
            self.rounds.verdict_next,
            self.stream.retracted(),
            self._free_counts(),
            self.lockstep,
            self._held(),
        )

    def _overdue(self, now: float) -> list[RankEffect]:
        """Whatever has been without an answer for a heartbeat: said again, in case it was lost."""
        retry_s = self._retry_s
        effects: list[RankEffect] = [
            SendUp(StreamVote(self.epoch, vote, self.stream.sequence))
            for vote in self.stream.overdue_votes(now, retry_s)
        ]
        if self.lockstep:
            frame = self.rounds.overdue(now, retry_s)
            if frame is not None:
                effects.append(SendUp(frame))
        else:
            effects += [
                SendUp(StreamAck(self.epoch, ack, self.stream.sequence))
                for ack in self.stream.overdue_acks(now, retry_s)
            ]
        return effects

    def _ignore(self, cause: str) -> list[RankEffect]:
        self.membership.ignored[cause] = self.membership.ignored.get(cause, 0) + 1
        return []
