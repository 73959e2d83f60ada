"""Who belongs to a group, on the coordinator: hello, prepare, accept, activate, loss.

    GATHERING --all said Hello--> PREPARING --all accepted--> ACTIVE
        ^                             |                         |
        +------- a member is lost, late, restarted or leaves ---+

A Hello that another member's stands against (another life of the same rank, or other settings) *contends*: the member
is probed, and only one that is heard after that refuses the newcomer. One that is not heard is lost in time, and the
newcomer is looked at again. So a killed group can be started anew with other settings at once, and a living one is
never disturbed.

Every state has its deadline: a member that is silent for `heartbeat_timeout_s` is lost; one that does not accept
within `prepare_timeout_s` is lost. Gathering has none on this side: a rank that waits has its own, and an idle
coordinator may wait for ever. Knows nothing of what the members agree on.
"""

from collections.abc import Callable
from enum import StrEnum

from kvcoord.domain import Rank
from kvcoord.protocol.effects import CoordinatorEffect, Note, Send
from kvcoord.protocol.messages import (
    NO_EPOCH,
    PROTOCOL_VERSION,
    Accept,
    Activate,
    Alive,
    Heartbeat,
    Hello,
    Prepare,
    Refused,
    Report,
    Suspended,
    Waiting,
    epoch_id,
    epoch_number,
)


class GroupState(StrEnum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    ACTIVE = "active"


class Member:
    """One rank that has said Hello. `activate` is kept until the rank is known to have it."""

    __slots__ = ("activate", "attach", "hello", "last_heard", "peer", "report", "sequence")

    def __init__(self, peer: bytes, hello: Hello, now: float) -> None:
        self.peer = peer
        self.hello = hello
        self.attach = hello.attach
        self.last_heard = now
        self.report: Report | None = None
        self.activate: Activate | None = None
        self.sequence = 0


class _Contender:
    """A Hello that the member of rank `against` stands against; `probe` numbers the question put to that member."""

    __slots__ = ("against", "hello", "peer", "probe")

    def __init__(self, peer: bytes, hello: Hello, against: Rank, probe: int) -> None:
        self.peer, self.hello, self.against, self.probe = peer, hello, against, probe


class Membership:
    """The members of one group.

    `end_work(rank)` is called when an active group has lost that member and before the others are told: what it returns
    is sent first. `members` and `peers` are without the lost one then.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        incarnation: int,
        heartbeat_timeout_s: float,
        prepare_timeout_s: float,
        end_work: Callable[[Rank], list[CoordinatorEffect]],
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.state = GroupState.GATHERING
        self.epoch = NO_EPOCH
        self.cause = "starting"
        self.lost_rank: Rank = -1
        self.members: dict[Rank, Member] = {}
        self.peers: tuple[bytes, ...] = ()
        self.ignored: dict[str, int] = {}
        self.released: list[bytes] = []
        """Peers that were let go; emptied by whoever keeps a map of peers."""
        self._incarnation = incarnation
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._prepare_timeout_s = prepare_timeout_s
        self._end_work = end_work
        self._number = 0
        self._probe = 0
        self._prepare_deadline = 0.0
        self._contenders: dict[Rank, _Contender] = {}
        self._ranks: dict[bytes, Rank] = {}

    # --- questions ------------------------------------------------------------------------------------------------

    def rank_of(self, peer: bytes) -> Rank | None:
        return self._ranks.get(peer)

    def holds(self, peer: bytes) -> bool:
        """Whether this peer is a member, or claims to be one and is being looked at."""
        return peer in self._ranks or any(peer == contender.peer for contender in self._contenders.values())

    def complete(self) -> bool:
        """All members have accepted the proposed epoch, and nothing but activation is left."""
        return self.state is GroupState.PREPARING and all(m.report is not None for m in self.members.values())

    def reports(self) -> dict[Rank, Report]:
        """What the members have reported, in order of rank."""
        reports = ((rank, self.members[rank].report) for rank in sorted(self.members))
        return {rank: report for rank, report in reports if report is not None}

    def deadline(self) -> float | None:
        times = [member.last_heard + self._heartbeat_timeout_s for member in self.members.values()]
        if self.state is GroupState.PREPARING:
            times.append(self._prepare_deadline)
        return min(times, default=None)

    # --- events ---------------------------------------------------------------------------------------------------

    def hello(self, peer: bytes, hello: Hello, now: float) -> list[CoordinatorEffect]:
        """A rank asks to join, perhaps not for the first time."""
        refused = _impossible(hello) or self._second_rank(peer, hello)
        if refused is not None:
            return self._refuse(peer, hello, refused)
        held = self.members.get(hello.rank)
        if held is not None and held.hello.incarnation == hello.incarnation:
            if hello.attach < held.attach:
                self._ignore("old_attach")
                return []
            if held.peer == peer and held.attach == hello.attach:
                held.last_heard = now
                return self._answer(held, now)
        conflict = self._conflict(peer, hello)
        if conflict is not None:
            return self._contend(peer, hello, conflict.other_rank)
        return self._admit(peer, hello, now)

    def accept(self, rank: Rank, accept: Accept, now: float) -> list[CoordinatorEffect]:
        """A member takes an epoch. Whether all have is then to be asked of `complete`."""
        member = self.members[rank]
        if accept.epoch != self.epoch or self.state is GroupState.GATHERING:
            self._ignore("stale_accept")
            return self._remind(member, accept.epoch)
        if self.state is GroupState.ACTIVE:
            return [] if member.activate is None else [Send((member.peer,), member.activate)]
        repeated = member.report is not None
        member.report = accept.report
        return [Send((member.peer,), Alive(self.epoch, self._incarnation, 0))] if repeated else []

    def activate(self, activates: dict[Rank, Activate]) -> list[CoordinatorEffect]:
        """All have accepted: the group works, and each rank is told what it lacks."""
        self.state = GroupState.ACTIVE
        self.cause = ""
        self.lost_rank = -1
        effects: list[CoordinatorEffect] = []
        for rank, activate in activates.items():
            member = self.members[rank]
            member.report = None
            member.activate = activate
            effects.append(Send((member.peer,), activate))
        return effects

    def heartbeat(self, rank: Rank, heartbeat: Heartbeat, sequence: int) -> list[CoordinatorEffect]:
        """A member lives. It is answered, also with what it seems to have missed; its contenders are settled."""
        member = self.members[rank]
        effects = self._settle(rank, heartbeat.probe) if heartbeat.probe and self._contenders else []
        if heartbeat.epoch == NO_EPOCH:
            return effects
        if self.state is not GroupState.ACTIVE:
            return effects + self._remind(member, heartbeat.epoch)
        if heartbeat.epoch == self.epoch:
            member.sequence = heartbeat.sequence
            member.activate = None
        return [*effects, Send((member.peer,), Alive(self.epoch, self._incarnation, sequence))]

    def gone(self, peer: bytes, now: float) -> list[CoordinatorEffect]:
        """The transport says that nobody is there any more."""
        for rank in [rank for rank, contender in self._contenders.items() if contender.peer == peer]:
            self._release(self._contenders.pop(rank).peer)
        lost = self._ranks.get(peer)
        return [] if lost is None else self.lose(lost, f"rank {lost} is not reachable", now)

    def tick(self, now: float) -> list[CoordinatorEffect]:
        """Lets every deadline up to `now` pass."""
        effects: list[CoordinatorEffect] = []
        for rank in sorted(self.members):
            member = self.members.get(rank)
            if member is not None and member.last_heard + self._heartbeat_timeout_s <= now:
                effects += self.lose(
                    rank, f"rank {rank} silent for {now - member.last_heard:.1f} s (heartbeat_timeout_s)", now
                )
        if self.state is GroupState.PREPARING and self._prepare_deadline <= now:
            late = next(rank for rank in sorted(self.members) if self.members[rank].report is None)
            cause = f"rank {late} did not accept epoch {epoch_number(self.epoch)} in time (prepare_timeout_s)"
            effects += self.lose(late, cause, now)
        return effects

    def leave(self, rank: Rank, now: float) -> list[CoordinatorEffect]:
        """The member goes in good order. To the others it is gone like any other."""
        return self.lose(rank, f"rank {rank} left", now, "member_left")

    def lose(self, rank: Rank, cause: str, now: float, kind: str = "member_lost") -> list[CoordinatorEffect]:
        """The member is gone: what was open ends now, and the others are told. `kind` is that of the note."""
        member = self.members.pop(rank)
        del self._ranks[member.peer]
        self._release(member.peer)
        self.peers = tuple(self.members[other].peer for other in sorted(self.members))
        effects: list[CoordinatorEffect] = [self._note(kind, {"rank": rank, "cause": cause})]
        if self.state is GroupState.ACTIVE:
            effects += self._end_work(rank)
        if self.state is not GroupState.GATHERING:
            self.state = GroupState.GATHERING
            self.cause, self.lost_rank = cause, rank
            if self.peers:
                effects.append(Send(self.peers, Suspended(self.epoch, rank, cause)))
        for other in [key for key, contender in self._contenders.items() if contender.against == rank]:
            effects += self._reconsider(self._contenders.pop(other), now)
        return effects

    def refuse(self, rank: Rank, refused: Refused, now: float) -> list[CoordinatorEffect]:
        """A member turns out not to fit: it is told why, and lost."""
        member = self.members[rank]
        effects = self._refuse(member.peer, member.hello, refused)
        return effects + self.lose(rank, f"rank {rank} was refused: {refused.field} is {refused.value}", now)

    # --- steps of joining -----------------------------------------------------------------------------------------

    def _admit(self, peer: bytes, hello: Hello, now: float) -> list[CoordinatorEffect]:
        """A group of another world size is made anew, by whoever keeps the groups, when this Hello is said again."""
        contender = self._contenders.pop(hello.rank, None)
        if contender is not None:
            self._release(contender.peer)
        if hello.rank in self.members:
            effects = self.lose(hello.rank, f"rank {hello.rank} joins again", now)
            return effects + self.hello(peer, hello, now)
        if hello.world_size != self.world_size:
            return []
        member = self.members[hello.rank] = Member(peer, hello, now)
        self._ranks[peer] = hello.rank
        self.peers = tuple(self.members[rank].peer for rank in sorted(self.members))
        self._number = max(self._number, epoch_number(hello.epoch))
        note = self._note("hello", {"rank": hello.rank, "incarnation": hello.incarnation})
        return [note, *self._answer(member, now)]

    def _answer(self, member: Member, now: float) -> list[CoordinatorEffect]:
        """To a Hello of a member. One in an active group can only be a late copy, and its sender is past it."""
        if self.state is GroupState.PREPARING:
            return [Send((member.peer,), Prepare(self.epoch, member.attach, self.lost_rank))]
        missing = [rank for rank in range(self.world_size) if rank not in self.members]
        if missing or self.state is GroupState.ACTIVE:
            return [Send((member.peer,), Waiting(self._incarnation, member.attach, missing))]
        self._number += 1
        self.epoch = epoch_id(self._number, self._incarnation)
        self.state = GroupState.PREPARING
        self._prepare_deadline = now + self._prepare_timeout_s
        effects: list[CoordinatorEffect] = [self._note("prepare", {"epoch": self._number})]
        for rank in sorted(self.members):
            other = self.members[rank]
            other.report = other.activate = None
            effects.append(Send((other.peer,), Prepare(self.epoch, other.attach, self.lost_rank)))
        return effects

    def _remind(self, member: Member, epoch: int) -> list[CoordinatorEffect]:
        """The member believes in an epoch that is over, or has not heard of the proposed one."""
        if self.state is GroupState.GATHERING:
            return [Send((member.peer,), Suspended(epoch, self.lost_rank, self.cause))]
        if self.state is GroupState.PREPARING and member.report is None:
            return [Send((member.peer,), Prepare(self.epoch, member.attach, self.lost_rank))]
        return [Send((member.peer,), Alive(self.epoch, self._incarnation, 0))]

    # --- contenders -----------------------------------------------------------------------------------------------

    def _contend(self, peer: bytes, hello: Hello, against: Rank) -> list[CoordinatorEffect]:
        known = self._contenders.get(hello.rank)
        if known is None or known.peer != peer or known.hello != hello or known.against != against:
            if known is not None and known.peer != peer:
                self._release(known.peer)
            self._probe += 1
            known = self._contenders[hello.rank] = _Contender(peer, hello, against, self._probe)
        probe = Alive(self.epoch, self._incarnation, 0, known.probe)
        waiting = Waiting(self._incarnation, hello.attach, [], against)
        return [Send((self.members[against].peer,), probe), Send((peer,), waiting)]

    def _settle(self, rank: Rank, probe: int) -> list[CoordinatorEffect]:
        """The member of this rank has answered a probe: who contended against it before that is refused."""
        effects: list[CoordinatorEffect] = []
        answered = [key for key, c in self._contenders.items() if c.against == rank and c.probe <= probe]
        for key in answered:
            contender = self._contenders.pop(key)
            refused = self._conflict(contender.peer, contender.hello)
            if refused is not None:
                effects += self._refuse(contender.peer, contender.hello, refused)
            self._release(contender.peer)
        return effects

    def _reconsider(self, contender: _Contender, now: float) -> list[CoordinatorEffect]:
        """What stood against this Hello is gone."""
        effects = self.hello(contender.peer, contender.hello, now)
        if not self.holds(contender.peer):
            self._release(contender.peer)
        return effects

    def _conflict(self, peer: bytes, hello: Hello) -> Refused | None:
        """What speaks against this Hello as things are now: another member's settings, or another life of its rank."""
        rank = hello.rank
        others = [member for other, member in sorted(self.members.items()) if other != rank]
        if others:
            reference = others[0].hello
            if hello.world_size != self.world_size:
                size = self.world_size
                return Refused("mismatch", "world_size", rank, hello.world_size, reference.rank, size)
            for field in sorted({*reference.fingerprint, *hello.fingerprint}):
                mine, theirs = hello.fingerprint.get(field, "absent"), reference.fingerprint.get(field, "absent")
                if mine != theirs:
                    return Refused("mismatch", field, rank, mine, reference.rank, theirs)
        held = self.members.get(rank)
        if held is not None and held.hello.incarnation != hello.incarnation and held.peer != peer:
            theirs = held.hello.incarnation
            return Refused("duplicate_rank", "incarnation", rank, hello.incarnation, rank, theirs)
        return None

    def _second_rank(self, peer: bytes, hello: Hello) -> Refused | None:
        held = self._ranks.get(peer, hello.rank)
        return None if held == hello.rank else Refused("duplicate", "rank", hello.rank, hello.rank, held, held)

    # --- small things ---------------------------------------------------------------------------------------------

    def _refuse(self, peer: bytes, hello: Hello, refused: Refused) -> list[CoordinatorEffect]:
        note = self._note("join_refused", {"rank": hello.rank, "field": refused.field, "value": refused.value})
        return [Send((peer,), refused), note]

    def _note(self, kind: str, detail: dict[str, object]) -> Note:
        return Note(kind, "", {**detail, "group": self.name})

    def _release(self, peer: bytes) -> None:
        self.released.append(peer)

    def _ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1


def _impossible(hello: Hello) -> Refused | None:
    """What is wrong with a Hello whoever the others are."""
    if hello.version != PROTOCOL_VERSION:
        return Refused("version", "protocol_version", hello.rank, hello.version, -1, PROTOCOL_VERSION)
    if not 0 <= hello.rank < hello.world_size:
        return Refused("range", "rank", hello.rank, hello.rank, -1, f"0 <= rank < {hello.world_size}")
    return None
