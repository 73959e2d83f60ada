"""Where a rank looks for its coordinator, and how long it waits for what.

Ranks must meet at one coordinator of a list without speaking to each other. Each stays where it is while the group
works; where ranks are missing it moves on after `gather_timeout_s`, but waits at the first of the list longer than a
whole tour of the others takes. So whoever can reach the first one meets there, and the others are tried in order.
"""

import msgspec


class RankLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one rank, in seconds and counts.

    `gather_timeout_s`: how long it waits for missing ranks at one coordinator before it tries the next of the list.
    """

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 3.0
    gather_timeout_s: float = 5.0
    join_timeout_s: float = 30.0
    group_deadline_s: float = 60.0
    decisions_kept_max: int = 4096
    report_bytes_max: int = 1 << 20
    """How long the part of a report may be that tells of entries."""


class Attachment:
    """The clockwork of one rank. `number` counts the attachments of this life: it tells late answers apart."""

    __slots__ = (
        "_absent",
        "_beat_at",
        "_count",
        "_ever_active",
        "_gathering_since",
        "_heard_at",
        "_limits",
        "_move_at",
        "_move_to",
        "_since",
        "_stopped_at",
        "index",
        "number",
    )

    def __init__(self, coordinator_count: int, limits: RankLimits) -> None:
        self.index = 0
        self.number = 0
        self._count = coordinator_count
        self._limits = limits
        self._ever_active = False
        self._absent = 0
        self._move_to = 0
        self._move_at = float("inf")
        self._stopped_at = self._since = self._heard_at = self._beat_at = self._gathering_since = 0.0

    @property
    def next_index(self) -> int:
        return (self.index + 1) % self._count

    def start(self, now: float) -> None:
        self._stopped_at = now
        self.attach(0, now)

    def attach(self, index: int, now: float) -> None:
        """A new connection, with a Hello that is sent at once."""
        self.index = index
        self._since = self._heard_at = now
        self._move_at = float("inf")
        self.again(now)

    def again(self, now: float) -> None:
        """A new attachment over the connection that there is, with a Hello that is sent at once."""
        self.number += 1
        self._beat_at = self._gathering_since = now

    def heard(self, now: float) -> None:
        self._heard_at = now
        self._absent = 0

    def beaten(self, now: float) -> None:
        self._beat_at = now

    def activated(self) -> None:
        self._ever_active = True

    def stopped(self, now: float) -> None:
        """The group, which worked, does not any more."""
        self._stopped_at = now

    def gathering(self, now: float) -> None:
        """From now on the other ranks are waited for here."""
        self._gathering_since = now

    def broken(self, now: float) -> None:
        """The connection is gone: connect again now, but at most once in a heartbeat interval."""
        self._absent = 0
        self._move_to = self.index
        self._move_at = max(now, self._since + self._limits.heartbeat_interval_s)

    def absent(self, now: float) -> None:
        """Nobody is at this coordinator's address: try the next one now, but one tour in a heartbeat interval."""
        if self._count == 1:
            return
        self._absent += 1
        self._move_to = self.next_index
        toured = self._absent % self._count == 0
        self._move_at = max(now, self._since + self._limits.heartbeat_interval_s) if toured else now

    def waited_s(self, now: float) -> float:
        return now - self._stopped_at

    def silent_s(self, now: float) -> float:
        return now - self._heard_at

    def given_up(self, now: float) -> bool:
        """The group has not worked for longer than the group deadline (before it ever did: the join timeout)."""
        return self._give_up_at() <= now

    def parted_to(self, now: float) -> int | None:
        """The coordinator to connect to now, since the connection is gone or could not be made. None: stay here."""
        return self._move_to if self._move_at <= now else None

    def silent(self, now: float) -> bool:
        return self._heard_at + self._limits.heartbeat_timeout_s <= now

    def deserted(self, now: float) -> bool:
        """The other ranks have not come here for so long that they may be at another coordinator."""
        return self._move_on_at() <= now

    def beat_due(self, now: float) -> bool:
        return self._beat_at + self._limits.heartbeat_interval_s <= now

    def deadline(self, *, active: bool, gathering: bool) -> float:
        """When the next of these becomes true; what is not watched in this state is left out."""
        limits = self._limits
        at = min(
            self._heard_at + limits.heartbeat_timeout_s, self._beat_at + limits.heartbeat_interval_s, self._move_at
        )
        if not active:
            at = min(at, self._give_up_at())
        return min(at, self._move_on_at()) if gathering else at

    def _give_up_at(self) -> float:
        limits = self._limits
        return self._stopped_at + (limits.group_deadline_s if self._ever_active else limits.join_timeout_s)

    def _move_on_at(self) -> float:
        if self._count == 1:
            return float("inf")
        tours = 1 if self.index else self._count + 1
        return self._gathering_since + tours * self._limits.gather_timeout_s
