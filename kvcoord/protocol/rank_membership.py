"""How one rank belongs to its group: joining, accepting, being suspended, moving on. DESIGN section 4.5.

    JOINING --Prepare--> ACCEPTED --Activate--> ACTIVE
       ^                    |                     |
       +---- coordinator silent, restarted or suspending ---+        any --deadline--> LOST, --refused--> REFUSED

Each state says its own thing at every heartbeat (Hello, Accept, Heartbeat), so a lost message is said again. Knows
nothing of what the members agree on: what it has to report is asked of its owner.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from kvcoord.domain import Rank, Reason
from kvcoord.protocol.effects import Attach, GroupSuspended, JoinFailed, Lost, RankEffect, SendUp
from kvcoord.protocol.messages import (
    NO_EPOCH,
    PROTOCOL_VERSION,
    Accept,
    Activate,
    Hello,
    Leave,
    Prepare,
    Refused,
    Report,
    Suspended,
    Waiting,
)
from kvcoord.protocol.rank_attachment import Attachment, RankLimits


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


ACTIVE: Final = RankState.ACTIVE
_ENDED: Final = (RankState.REFUSED, RankState.LOST, RankState.LEFT)
"""Both are asked with every message: looking a member up in its enum costs several times a global."""


class RankMembership:
    """One rank's place in its group. `report()` is asked for what the rank knows whenever it accepts an epoch."""

    def __init__(
        self, identity: Identity, coordinator_count: int, limits: RankLimits, report: Callable[[], Report]
    ) -> None:
        self.identity = identity
        self.state = RankState.JOINING
        self.epoch = NO_EPOCH
        self.cause = "no coordinator has answered yet"
        self.suspended_reason = Reason.COORDINATOR_LOST
        self.suspended_rank: Rank = -1
        self.attachment = Attachment(coordinator_count, limits)
        self.ignored: dict[str, int] = {}
        self._report = report

    @property
    def active(self) -> bool:
        return self.state is ACTIVE

    @property
    def ended(self) -> bool:
        """Nothing will happen any more."""
        return self.state in _ENDED

    def start(self, now: float) -> list[RankEffect]:
        self.attachment.start(now)
        return [Attach(0), SendUp(self._hello())]

    def leave(self) -> list[RankEffect]:
        if self.ended:
            return []
        self.state = RankState.LEFT
        return [SendUp(Leave(self.epoch))]

    def gone(self, now: float) -> list[RankEffect]:
        """The connection is gone. Connecting again is left to `tick`, due at once or soon."""
        if self.ended:
            return []
        self.attachment.broken(now)
        cause = f"the connection to coordinator {self.attachment.index} is gone"
        return self._suspend(Reason.COORDINATOR_LOST, -1, cause, now)

    def absent(self, now: float) -> list[RankEffect]:
        """No connection can be made. Moving on is left to `tick`, due at once or soon."""
        if self.ended:
            return []
        self.attachment.absent(now)
        cause = f"nobody answers at the address of coordinator {self.attachment.index}"
        return self._suspend(Reason.COORDINATOR_LOST, -1, cause, now)

    def tick(self, now: float) -> list[RankEffect]:
        """Deadlines of all states, and what is said at a heartbeat while joining."""
        if self.ended:
            return []
        link = self.attachment
        if not self.active and link.given_up(now):
            self.state = RankState.LOST
            return [Lost(self.cause, link.waited_s(now))]
        parted_to = link.parted_to(now)
        if parted_to is not None:
            return self._move(parted_to, now)
        if link.silent(now):
            cause = f"coordinator {link.index} silent for {link.silent_s(now):.1f} s (heartbeat_timeout_s)"
            effects = self._suspend(Reason.COORDINATOR_LOST, -1, cause, now)
            return effects + self._move(link.next_index, now)
        if self.active:
            return []
        if self.state is RankState.JOINING and link.deserted(now):
            return self._move(link.next_index, now)
        if not link.beat_due(now):
            return []
        link.beaten(now)
        return [SendUp(self._hello() if self.state is RankState.JOINING else Accept(self.epoch, self._report()))]

    def deadline(self) -> float | None:
        """When `tick` has something to do or a heartbeat is due, None for never."""
        if self.ended:
            return None
        return self.attachment.deadline(active=self.active, gathering=self.state is RankState.JOINING)

    # --- what the coordinator says --------------------------------------------------------------------------------

    def waiting(self, message: Waiting) -> list[RankEffect]:
        if self.state is not RankState.JOINING or message.attach != self.attachment.number:
            return self._ignore("stale_waiting")
        if message.held >= 0:
            self.cause = f"waiting until it shows whether rank {message.held}, which stands in the way, is alive"
        elif message.missing:
            self.cause = "waiting for ranks " + ",".join(map(str, message.missing))
        return []

    def refused(self, message: Refused) -> list[RankEffect]:
        if self.active:
            return self._ignore("unexpected")
        self.state = RankState.REFUSED
        self.cause = f"refused ({message.reason}): {message.field}"
        return [JoinFailed(message.reason, message.field, message.value, message.other_rank, message.other_value)]

    def prepare(self, prepare: Prepare, now: float) -> list[RankEffect]:
        """Accepts the proposed epoch and reports. From here on nothing older is taken."""
        known = prepare.epoch == self.epoch and self.active
        if prepare.attach != self.attachment.number or prepare.epoch < self.epoch or known:
            return self._ignore("stale_prepare")
        effects: list[RankEffect] = []
        if self.active:
            effects = self._suspend(Reason.RANK_LOST, prepare.lost, f"rank {prepare.lost} was lost", now)
        self.epoch = prepare.epoch
        self.state = RankState.ACCEPTED
        self.attachment.beaten(now)
        return [*effects, SendUp(Accept(self.epoch, self._report()))]

    def activate(self, activate: Activate) -> bool:
        """Whether this is the activation that this rank has been waiting for."""
        if activate.epoch != self.epoch or self.state is not RankState.ACCEPTED:
            self._ignore("stale_activate")
            return False
        self.state = RankState.ACTIVE
        self.attachment.activated()
        self.cause = ""
        return True

    def suspended(self, message: Suspended, now: float) -> list[RankEffect]:
        """The coordinator keeps this rank's Hello: it is said again at the next heartbeat, should that be lost."""
        if message.epoch != self.epoch or self.state not in (RankState.ACTIVE, RankState.ACCEPTED):
            return self._ignore("stale_epoch")
        self.attachment.beaten(now)
        return self._suspend(Reason.RANK_LOST, message.rank, message.cause, now)

    def rejoin(self, now: float) -> list[RankEffect]:
        """The coordinator has been restarted, or had given this rank up: join again where we are."""
        if self.state is RankState.JOINING:
            return []
        cause = "the coordinator does not know this rank any more"
        return self.join_again(Reason.COORDINATOR_LOST, -1, cause, now)

    def join_again(self, reason: Reason, rank: Rank, cause: str, now: float) -> list[RankEffect]:
        """Ends its part in this epoch, and says Hello to the same coordinator."""
        if self.ended:
            return []
        effects = self._suspend(reason, rank, cause, now)
        self.attachment.again(now)
        return [*effects, SendUp(self._hello())]

    # --- small things ---------------------------------------------------------------------------------------------

    def _suspend(self, reason: Reason, rank: Rank, cause: str, now: float) -> list[RankEffect]:
        """Back to joining. The owner is told when the group worked until now."""
        was_active = self.active
        if self.state is not RankState.JOINING:
            self.attachment.gathering(now)
        self.state = RankState.JOINING
        self.cause = cause
        self.suspended_reason, self.suspended_rank = reason, rank
        if not was_active:
            return []
        self.attachment.stopped(now)
        return [GroupSuspended(rank, cause)]

    def _move(self, index: int, now: float) -> list[RankEffect]:
        self.attachment.attach(index, now)
        return [Attach(self.attachment.index), SendUp(self._hello())]

    def _hello(self) -> Hello:
        who = self.identity
        return Hello(
            PROTOCOL_VERSION,
            who.group,
            who.rank,
            who.world_size,
            who.incarnation,
            self.attachment.number,
            self.epoch,
            who.fingerprint,
        )

    def _ignore(self, cause: str) -> list[RankEffect]:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
        return []
