"""The coordinator: which group a peer speaks for, and the groups. One process serves many groups.

Knows nothing of sockets, processes or status pages. A group is made by its first Hello, and forgotten when it has
been empty for `group_forget_s`, so that a long-lived coordinator does not grow with the groups it has seen.
"""

from kvcoord.errors import FrameError, FrameOversized, FrameVersionMismatch, UsageError
from kvcoord.protocol.effects import CoordinatorEffect, Send
from kvcoord.protocol.group import GroupLimits, GroupMachine
from kvcoord.protocol.messages import (
    INCARNATION_BITS,
    PROTOCOL_VERSION,
    FromRank,
    Hello,
    Refused,
    Rejoin,
    StatusRequest,
)


class CoordinatorMachine:
    """Raises UsageError when the incarnation does not fit an epoch.

    `step` takes a decoded message, `malformed` what could not be decoded, `gone` a lost peer, `tick` the time."""

    def __init__(
        self,
        incarnation: int,
        limits: GroupLimits,
        *,
        groups_max: int = 1024,
        ranks_max: int = 1024,
        group_forget_s: float = 60.0,
    ) -> None:
        if not 0 < incarnation < 1 << INCARNATION_BITS:
            raise UsageError("incarnation", incarnation, f"must be positive and fit in {INCARNATION_BITS} bits")
        self.incarnation = incarnation
        self.groups: dict[str, GroupMachine] = {}
        self.ignored: dict[str, int] = {}
        self.messages = 0
        self._limits = limits
        self._groups_max = groups_max
        self._ranks_max = ranks_max
        self._forget_s = group_forget_s
        self._group_of: dict[bytes, GroupMachine] = {}
        self._empty_since: dict[str, float] = {}

    def step(self, peer: bytes, message: FromRank, now: float) -> list[CoordinatorEffect]:
        """One message. StatusRequest is the shell's to answer and is not accepted here."""
        self.messages += 1
        if type(message) is Hello:
            return self._hello(peer, message, now)
        group = self._group_of.get(peer)
        if group is None or type(message) is StatusRequest:
            self._ignore("unknown_peer")
            return [Send((peer,), Rejoin(self.incarnation))]
        effects = group.step(peer, message, now)
        if group.membership.released or not group.members or self._empty_since:
            self._after(group, now)
        return effects

    def malformed(self, peer: bytes, error: FrameError) -> list[CoordinatorEffect]:
        """Bytes that are no message are counted and dropped; another protocol version is told which one is spoken."""
        if isinstance(error, FrameVersionMismatch):
            self._ignore("version")
            refused = Refused("version", "protocol_version", -1, error.cause, -1, PROTOCOL_VERSION)
            return [Send((peer,), refused)]
        self._ignore("oversized" if isinstance(error, FrameOversized) else "malformed")
        return []

    def gone(self, peer: bytes, now: float) -> list[CoordinatorEffect]:
        """Nobody is there any more at `peer`."""
        group = self._group_of.get(peer)
        if group is None:
            return []
        effects = group.gone(peer, now)
        self._after(group, now)
        return effects

    def probe(self) -> list[CoordinatorEffect]:
        """Somebody is gone whom the transport cannot name: a word to every member shows who."""
        return [effect for group in self.groups.values() for effect in group.probe()]

    def tick(self, now: float) -> list[CoordinatorEffect]:
        """Lets every deadline up to `now` pass."""
        effects: list[CoordinatorEffect] = []
        for group in self.groups.values():
            effects += group.tick(now)
            self._after(group, now)
        for name in [name for name, since in self._empty_since.items() if since + self._forget_s <= now]:
            del self._empty_since[name]
            del self.groups[name]
        return effects

    def deadline(self) -> float | None:
        """When `tick` has something to do, None for never."""
        times = [time for time in (group.deadline() for group in self.groups.values()) if time is not None]
        times += [since + self._forget_s for since in self._empty_since.values()]
        return min(times, default=None)

    def _hello(self, peer: bytes, hello: Hello, now: float) -> list[CoordinatorEffect]:
        group = self.groups.get(hello.group)
        other = self._group_of.get(peer)
        if other is not None and other is not group:
            refused = Refused("duplicate", "group", hello.rank, hello.group, -1, other.name)
            return [Send((peer,), refused)]
        if group is None or (not group.members and group.world_size != hello.world_size):
            if group is None and len(self.groups) >= self._groups_max:
                return [Send((peer,), Refused("limit", "groups_max", hello.rank, hello.group, -1, self._groups_max))]
            if hello.world_size > self._ranks_max:
                refused = Refused("limit", "world_size", hello.rank, hello.world_size, -1, self._ranks_max)
                return [Send((peer,), refused)]
            group = GroupMachine(hello.group, hello.world_size, self.incarnation, self._limits)
        effects = group.step(peer, hello, now)
        if group.holds(peer):
            self.groups[group.name] = group
            self._group_of[peer] = group
        if self.groups.get(group.name) is group:
            self._after(group, now)
        return effects

    def _after(self, group: GroupMachine, now: float) -> None:
        """Follows what a group has done: whom it let go, and whether it is empty."""
        for peer in group.released():
            self._group_of.pop(peer, None)
        if group.members:
            self._empty_since.pop(group.name, None)
        else:
            self._empty_since.setdefault(group.name, now)

    def _ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
