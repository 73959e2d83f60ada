"""The rank side of the protocol. DESIGN sections 4.1, 4.2 and 4.5.

    JOINING --Prepare--> ACCEPTED --Activate--> ACTIVE
       ^                    |                     |
       +---- coordinator silent, restarted or suspending ---+        any --deadline--> LOST, --refused--> REFUSED

The same machine runs in a sidecar worker and inside an engine that keeps its own pools. It knows nothing of pages: what
a vote is about is its owner's business. It never decides: a rank that has voted waits for the coordinator, for the next
coordinator, or for the group deadline.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from kvcoord.domain import OperationId, Rank, Reason
from kvcoord.protocol.effects import (
    Activated,
    Apply,
    Attach,
    DivergenceSeen,
    GroupSuspended,
    JoinFailed,
    LogWanted,
    Lost,
    RankEffect,
    SendUp,
    VerdictReady,
)
from kvcoord.protocol.messages import (
    NO_EPOCH,
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Activate,
    Alive,
    Decision,
    Divergence,
    FetchEntries,
    FromCoordinator,
    Heartbeat,
    Hello,
    Leave,
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
from kvcoord.protocol.rank_rounds import RankRounds
from kvcoord.protocol.rank_stream import RankStream


class RankLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one rank, in seconds and counts."""

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 3.0
    join_timeout_s: float = 30.0
    group_deadline_s: float = 60.0
    decisions_kept_max: int = 4096


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this rank is. `fingerprint`: the settings on which all ranks must agree, by name."""

    group: str
    rank: Rank
    world_size: int
    incarnation: int
    fingerprint: dict[str, str | int]


class RankState(StrEnum):
    JOINING = "joining"
    ACCEPTED = "accepted"
    ACTIVE = "active"
    REFUSED = "refused"
    LOST = "lost"
    LEFT = "left"


_FINAL = (RankState.REFUSED, RankState.LOST, RankState.LEFT)


class RankMachine:
    """One member of a group. `receive` takes the coordinator's messages, `tick` lets deadlines pass.

    `free_counts` is asked for the free pages per pool when the rank reports what it knows.
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
    ) -> None:
        self.identity = identity
        self.state = RankState.JOINING
        self.epoch = NO_EPOCH
        self.history = NO_EPOCH
        self.cause = "no coordinator has answered yet"
        self.suspended_reason = Reason.COORDINATOR_LOST
        self.suspended_rank: Rank = -1
        self.stream = RankStream(limits.decisions_kept_max)
        self.rounds = RankRounds(lag)
        self.lockstep = lockstep
        self.ignored: dict[str, int] = {}
        self._free_counts = free_counts
        self._limits = limits
        self._coordinators = coordinator_count
        self._index = 0
        self._attach = 0
        self._heard_at = 0.0
        self._beat_at = 0.0
        self._waiting_since = 0.0
        self._ever_active = False

    @property
    def active(self) -> bool:
        return self.state is RankState.ACTIVE

    @property
    def coordinator_index(self) -> int:
        """Which coordinator of the list this rank is attached to."""
        return self._index

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[RankEffect]:
        """Attaches to the first coordinator of the list and says Hello."""
        self._waiting_since = now
        return self._attach_to(0, now)

    def leave(self, now: float) -> list[RankEffect]:
        """Ends membership in good order."""
        if self.state in _FINAL:
            return []
        self.state = RankState.LEFT
        return [SendUp(Leave(self.epoch))]

    def tick(self, now: float) -> list[RankEffect]:
        """Lets every deadline up to `now` pass."""
        if self.state in _FINAL:
            return []
        limit_s = self._limits.group_deadline_s if self._ever_active else self._limits.join_timeout_s
        if self.state is not RankState.ACTIVE and self._waiting_since + limit_s <= now:
            self.state = RankState.LOST
            return [Lost(self.cause, now - self._waiting_since)]
        if self._heard_at + self._limits.heartbeat_timeout_s <= now:
            silent_s = now - self._heard_at
            cause = f"coordinator {self._index} silent for {silent_s:.1f} s"
            effects = self._suspend(Reason.COORDINATOR_LOST, -1, cause, now)
            return effects + self._attach_to((self._index + 1) % self._coordinators, now)
        if self._beat_at + self._limits.heartbeat_interval_s > now:
            return []
        self._beat_at = now
        if self.state is RankState.JOINING:
            return [SendUp(self._hello())]
        return [SendUp(Heartbeat(self.epoch, self.stream.sequence)), *self._overdue(now)]

    def deadline(self) -> float | None:
        """When `tick` has something to do, None for never."""
        if self.state in _FINAL:
            return None
        times = [self._heard_at + self._limits.heartbeat_timeout_s, self._beat_at + self._limits.heartbeat_interval_s]
        if self.state is not RankState.ACTIVE:
            limit_s = self._limits.group_deadline_s if self._ever_active else self._limits.join_timeout_s
            times.append(self._waiting_since + limit_s)
        return min(times)

    # --- what the owner says --------------------------------------------------------------------------------------

    def vote(self, vote: Vote, now: float) -> list[RankEffect]:
        """A vote that is sent at once. The decision comes as an Apply, or is known already (`decided`)."""
        if self.stream.vote(vote, now) is not None or not self.active:
            return []
        return [SendUp(StreamVote(self.epoch, vote))]

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
        return [SendUp(StreamAck(self.epoch, ack))] if self.active else []

    def frame(self, step: int, free: list[int], digest: int, now: float) -> list[RankEffect]:
        """Sends the frame of this step. While the group is suspended it is kept and sent at the next activation."""
        frame = self.rounds.frame(self.epoch, step, free, digest, now)
        return [SendUp(frame)] if self.active else []

    def log(self, round_number: int, events: list[tuple[str, int]]) -> list[RankEffect]:
        """The answer to LogWanted."""
        return [SendUp(OperationLog(self.epoch, round_number, events))]

    # --- what the coordinator says --------------------------------------------------------------------------------

    def receive(self, message: FromCoordinator, now: float) -> list[RankEffect]:
        """One message from the coordinator this rank is attached to. Others' messages must not be passed in."""
        if self.state in _FINAL:
            return []
        self._heard_at = now
        if isinstance(message, Numbered):
            return self._entry(message)
        if isinstance(message, Verdict):
            return self._verdict(message)
        if isinstance(message, Alive):
            return self._alive(message)
        if isinstance(message, Waiting):
            if self.state is RankState.JOINING and message.attach == self._attach and message.missing:
                self.cause = "waiting for ranks " + ",".join(map(str, message.missing))
            return []
        if isinstance(message, Refused):
            self.state = RankState.REFUSED
            return [JoinFailed(message.reason, message.field, message.value, message.other_rank, message.other_value)]
        if isinstance(message, Prepare):
            return self._prepare(message)
        if isinstance(message, Activate):
            return self._activate(message, now)
        if isinstance(message, Suspended):
            return self._suspended(message, now)
        if isinstance(message, Rejoin):
            return self._rejoin(now)
        return self._other(message)

    def _entry(self, message: Numbered) -> list[RankEffect]:
        if not self.active or message.epoch != self.epoch:
            return self._ignore("stale_epoch")
        if self.stream.take(message.entry):
            return [Apply(message.entry)]
        if message.entry.sequence > self.stream.sequence + 1:
            return [SendUp(FetchEntries(self.epoch, self.stream.sequence))]
        return []

    def _verdict(self, verdict: Verdict) -> list[RankEffect]:
        if not self.active or verdict.epoch != self.epoch:
            return self._ignore("stale_epoch")
        return self._take_verdict(verdict)

    def _take_verdict(self, verdict: Verdict) -> list[RankEffect]:
        if not self.rounds.take(verdict):
            return []
        for completion in verdict.completions:
            self.stream.completed(completion)
        return [VerdictReady(verdict.round)]

    def _alive(self, alive: Alive) -> list[RankEffect]:
        effects: list[RankEffect] = []
        if alive.probe:
            effects.append(SendUp(Heartbeat(self.epoch, self.stream.sequence)))
        if self.active and alive.epoch == self.epoch and alive.sequence > self.stream.sequence:
            effects.append(SendUp(FetchEntries(self.epoch, self.stream.sequence)))
        return effects

    def _prepare(self, prepare: Prepare) -> list[RankEffect]:
        if prepare.attach != self._attach or prepare.epoch < self.epoch:
            return self._ignore("stale_prepare")
        if prepare.epoch == self.epoch and self.state is RankState.ACTIVE:
            return self._ignore("stale_prepare")
        self.epoch = prepare.epoch
        self.state = RankState.ACCEPTED
        report = Report(
            self.history,
            self.stream.sequence,
            self.stream.kept(),
            self.stream.in_doubt(),
            self.rounds.kept(),
            self.rounds.last_frame,
            self._free_counts(),
        )
        return [SendUp(Accept(self.epoch, report))]

    def _activate(self, activate: Activate, now: float) -> list[RankEffect]:
        if activate.epoch != self.epoch or self.state is not RankState.ACCEPTED:
            return self._ignore("stale_activate")
        self.state = RankState.ACTIVE
        self._ever_active = True
        self.cause = ""
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
        """What the new coordinator has not heard: votes in doubt were aborted, so acks and frames remain."""
        effects: list[RankEffect] = []
        frames = self.rounds.resend(self.epoch, last_round, now)
        effects += [SendUp(frame) for frame in frames]
        told = {ack.operation for frame in frames for ack in frame.acks}
        for ack in self.stream.unfinished():
            if ack.operation in told:
                continue
            if self.lockstep:
                self.rounds.ack(ack)
            else:
                effects.append(SendUp(StreamAck(self.epoch, ack)))
        return effects

    def _suspended(self, message: Suspended, now: float) -> list[RankEffect]:
        if message.epoch != self.epoch or self.state not in (RankState.ACTIVE, RankState.ACCEPTED):
            return self._ignore("stale_epoch")
        effects = self._suspend(Reason.RANK_LOST, message.rank, message.cause, now)
        self._beat_at = now
        return effects

    def _rejoin(self, now: float) -> list[RankEffect]:
        """The coordinator has been restarted, or had given this rank up: join again where we are."""
        if self.state is RankState.JOINING:
            return []
        effects = self._suspend(Reason.COORDINATOR_LOST, -1, "the coordinator does not know this rank any more", now)
        self._attach += 1
        self._beat_at = now
        return [*effects, SendUp(self._hello())]

    def _other(self, message: FromCoordinator) -> list[RankEffect]:
        if isinstance(message, LogRequest) and message.epoch == self.epoch:
            return [LogWanted(message.round)]
        if isinstance(message, Divergence) and message.epoch == self.epoch:
            return [DivergenceSeen(message.round, message.sides, message.operation)]
        return self._ignore("unexpected")

    # --- small things ---------------------------------------------------------------------------------------------

    def _suspend(self, reason: Reason, rank: Rank, cause: str, now: float) -> list[RankEffect]:
        was_active = self.state is RankState.ACTIVE
        self.state = RankState.JOINING
        self.cause = cause
        self.suspended_reason, self.suspended_rank = reason, rank
        if not was_active:
            return []
        self._waiting_since = now
        return [GroupSuspended(rank, cause)]

    def _attach_to(self, index: int, now: float) -> list[RankEffect]:
        self._index = index
        self._attach += 1
        self._heard_at = self._beat_at = now
        return [Attach(index), SendUp(self._hello())]

    def _hello(self) -> Hello:
        who = self.identity
        return Hello(
            PROTOCOL_VERSION,
            who.group,
            who.rank,
            who.world_size,
            who.incarnation,
            self._attach,
            self.epoch,
            who.fingerprint,
        )

    def _overdue(self, now: float) -> list[RankEffect]:
        """Whatever has been without an answer for a heartbeat: said again, in case it was lost."""
        if not self.active:
            return []
        retry_s = self._limits.heartbeat_interval_s
        effects: list[RankEffect] = [
            SendUp(StreamVote(self.epoch, vote)) for vote in self.stream.overdue_votes(now, retry_s)
        ]
        if self.lockstep:
            frame = self.rounds.overdue(now, retry_s)
            if frame is not None:
                effects.append(SendUp(frame))
        else:
            effects += [SendUp(StreamAck(self.epoch, ack)) for ack in self.stream.overdue_acks(now, retry_s)]
        return effects

    def _ignore(self, cause: str) -> list[RankEffect]:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
        return []
