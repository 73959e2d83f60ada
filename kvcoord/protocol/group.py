"""One group on the coordinator: membership, and what its members may do once they are all there.

    GATHERING --all said Hello--> PREPARING --all accepted--> ACTIVE
        ^                             |                         |
        +------- a member is lost, late, restarted or leaves ---+

Every state has its deadline: a member that is silent for `heartbeat_timeout_s` is lost; one that does not accept
within `prepare_timeout_s` is lost. Gathering has none on this side: a rank that waits has its own, and an idle
coordinator may wait for ever.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kvcoord.domain import COPYING_KINDS, Outcome, Rank, Reason
from kvcoord.protocol import digest as digests
from kvcoord.protocol.effects import CoordinatorEffect, Note, Send
from kvcoord.protocol.messages import (
    NO_EPOCH,
    PROTOCOL_VERSION,
    Accept,
    Activate,
    Alive,
    Completion,
    Decision,
    Divergence,
    FetchEntries,
    Frame,
    FromCoordinator,
    FromRank,
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
    Waiting,
    epoch_id,
    epoch_number,
)
from kvcoord.protocol.recovery import merge
from kvcoord.protocol.rounds import RoundTable
from kvcoord.protocol.stream import StreamTable
from kvcoord.protocol.transfers import TransferTable


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one group. Seconds and counts; see `config` for what each is for."""

    heartbeat_timeout_s: float = 3.0
    prepare_timeout_s: float = 5.0
    vote_timeout_s: float = 5.0
    round_timeout_s: float = 10.0
    copy_timeout_s: float = 30.0
    operations_open_max: int = 4096
    decisions_kept_max: int = 4096
    rounds_kept_max: int = 256


class GroupState(StrEnum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    ACTIVE = "active"


class Member:
    """One rank that has said Hello."""

    __slots__ = ("attach", "hello", "last_heard", "peer", "report", "sequence")

    def __init__(self, peer: bytes, hello: Hello, now: float) -> None:
        self.peer = peer
        self.hello = hello
        self.attach = hello.attach
        self.last_heard = now
        self.report: Report | None = None
        self.sequence = 0


class GroupMachine:
    """Decides for one group. `step` takes a member's message; `tick` lets deadlines pass; both return effects."""

    def __init__(self, name: str, world_size: int, incarnation: int, limits: GroupLimits) -> None:
        self.name = name
        self.world_size = world_size
        self.state = GroupState.GATHERING
        self.epoch = NO_EPOCH
        self.cause = "starting"
        self.members: dict[Rank, Member] = {}
        self.divergence: Divergence | None = None
        everyone = (1 << world_size) - 1
        self.transfers = TransferTable(everyone, limits.copy_timeout_s, limits.decisions_kept_max)
        self.stream = StreamTable(
            everyone, limits.vote_timeout_s, limits.operations_open_max, limits.decisions_kept_max
        )
        self.rounds = RoundTable(world_size, self.transfers, limits.round_timeout_s, limits.rounds_kept_max)
        self.counters = {"commits": 0, "aborts": 0, "completions": 0, "retractions": 0, "rounds": 0, "divergences": 0}
        self.aborts: dict[str, int] = {}
        self.ignored: dict[str, int] = {}
        self._incarnation = incarnation
        self._limits = limits
        self._number = 0
        self._prepare_deadline = 0.0
        self._contenders: dict[Rank, tuple[bytes, Hello]] = {}
        self._peers: tuple[bytes, ...] = ()
        self._ranks: dict[bytes, Rank] = {}
        self._logs: dict[Rank, list[tuple[str, int]]] | None = None

    # --- events ---------------------------------------------------------------------------------------------------

    def step(self, peer: bytes, message: FromRank, now: float) -> list[CoordinatorEffect]:
        """One message from a peer of this group."""
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        rank = self._ranks.get(peer)
        if rank is None:
            self._ignore("unknown_peer")
            return [Send((peer,), Rejoin(self._incarnation))]
        member = self.members[rank]
        member.last_heard = now
        effects = self._settle_contender(rank, now) if self._contenders else []
        if isinstance(message, Heartbeat):
            member.sequence = message.sequence
            effects.append(Send((peer,), Alive(self.epoch, self._incarnation, self.stream.sequence)))
        elif isinstance(message, Accept):
            effects += self._accept(rank, message, now)
        elif isinstance(message, Leave):
            effects += self._lose(rank, f"rank {rank} left", now)
        elif self.state is not GroupState.ACTIVE or message.epoch != self.epoch:  # type: ignore[union-attr]
            self._ignore("stale_epoch")
        elif isinstance(message, Frame):
            effects += self._frame(rank, message, now)
        elif isinstance(message, StreamVote):
            effects += self._vote(rank, message, now)
        elif isinstance(message, StreamAck):
            completion = self.transfers.record(rank, message.ack, now)
            if completion is not None:
                effects += self._completed(completion)
        elif isinstance(message, FetchEntries):
            effects += self._fetch_entries(rank, message, now)
        elif isinstance(message, OperationLog):
            effects += self._log(rank, message)
        else:
            self._ignore("unexpected")
        return effects

    def holds(self, peer: bytes) -> bool:
        """Whether this peer is a member, or claims to be one and is being looked at."""
        return peer in self._ranks or any(peer == contender for contender, _ in self._contenders.values())

    def gone(self, peer: bytes, now: float) -> list[CoordinatorEffect]:
        """The transport says that nobody is there any more, or that its queue is full."""
        rank = self._ranks.get(peer)
        return [] if rank is None else self._lose(rank, f"rank {rank} is not reachable", now)

    def tick(self, now: float) -> list[CoordinatorEffect]:
        """Lets every deadline up to `now` pass."""
        effects: list[CoordinatorEffect] = []
        for rank in sorted(self.members):
            member = self.members.get(rank)
            if member is not None and member.last_heard + self._limits.heartbeat_timeout_s <= now:
                silent_s = now - member.last_heard
                effects += self._lose(rank, f"rank {rank} silent for {silent_s:.1f} s", now)
        if self.state is GroupState.PREPARING and self._prepare_deadline <= now:
            late = next(rank for rank in sorted(self.members) if self.members[rank].report is None)
            effects += self._lose(late, f"rank {late} did not accept epoch {epoch_number(self.epoch)} in time", now)
        if self.state is GroupState.ACTIVE:
            effects += [self._aborted(decision) for decision in self.stream.expire(now)]
            lockstep = self.rounds.next_round is not None
            for completion in self.transfers.expire(now):
                if lockstep:
                    self.rounds.pending.append(completion)
                else:
                    effects += self._completed(completion)
            effects += self._close_rounds(now)
        return effects

    def deadline(self) -> float | None:
        """When `tick` has something to do, None for never."""
        times = [member.last_heard + self._limits.heartbeat_timeout_s for member in self.members.values()]
        if self.state is GroupState.PREPARING:
            times.append(self._prepare_deadline)
        elif self.state is GroupState.ACTIVE:
            times += [
                t for t in (self.stream.deadline(), self.rounds.deadline(), self.transfers.deadline()) if t is not None
            ]
        return min(times, default=None)

    # --- membership -----------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: Hello, now: float) -> list[CoordinatorEffect]:
        refused = self._mismatch(hello)
        if refused is not None:
            note = Note("join_refused", "", {"rank": hello.rank, "field": refused.field, "value": refused.value})
            return [Send((peer,), refused), note]
        held = self.members.get(hello.rank)
        if held is not None and held.hello.incarnation != hello.incarnation:
            self._contenders[hello.rank] = (peer, hello)
            return [Send((held.peer,), Alive(self.epoch, self._incarnation, self.stream.sequence, True))]
        if held is not None and held.peer == peer and held.attach == hello.attach:
            held.last_heard = now
            return self._answer_hello(held, now)
        if held is not None and hello.attach < held.attach:
            self._ignore("old_attach")
            return []
        return self._admit(peer, hello, now)

    def _admit(self, peer: bytes, hello: Hello, now: float) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = []
        if hello.rank in self.members:
            effects += self._lose(hello.rank, f"rank {hello.rank} joins again", now)
        self.members[hello.rank] = Member(peer, hello, now)
        self._ranks[peer] = hello.rank
        self._number = max(self._number, epoch_number(hello.epoch))
        effects.append(Note("hello", "", {"rank": hello.rank, "incarnation": hello.incarnation}))
        return effects + self._answer_hello(self.members[hello.rank], now)

    def _answer_hello(self, member: Member, now: float) -> list[CoordinatorEffect]:
        if self.state is GroupState.PREPARING:
            return [Send((member.peer,), Prepare(self.epoch, member.attach))]
        missing = [rank for rank in range(self.world_size) if rank not in self.members]
        if missing or self.state is GroupState.ACTIVE:
            return [Send((member.peer,), Waiting(self._incarnation, member.attach, missing))]
        return self._prepare(now)

    def _prepare(self, now: float) -> list[CoordinatorEffect]:
        self._number += 1
        self.epoch = epoch_id(self._number, self._incarnation)
        self.state = GroupState.PREPARING
        self._prepare_deadline = now + self._limits.prepare_timeout_s
        effects: list[CoordinatorEffect] = [Note("prepare", "", {"epoch": self._number})]
        for member in self.members.values():
            member.report = None
            effects.append(Send((member.peer,), Prepare(self.epoch, member.attach)))
        return effects

    def _accept(self, rank: Rank, accept: Accept, now: float) -> list[CoordinatorEffect]:
        if self.state is not GroupState.PREPARING or accept.epoch != self.epoch:
            self._ignore("stale_accept")
            return []
        self.members[rank].report = accept.report
        if any(member.report is None for member in self.members.values()):
            return []
        return self._activate(now)

    def _activate(self, now: float) -> list[CoordinatorEffect]:
        reports = {rank: member.report for rank, member in self.members.items() if member.report is not None}
        widths = {rank: len(report.free) for rank, report in reports.items()}
        if len(set(widths.values())) != 1:
            odd = max(widths, key=lambda rank: (widths[rank] != widths[min(widths)], rank))
            return self._lose(
                odd, f"rank {odd} reports {widths[odd]} pools, rank {min(widths)} {widths[min(widths)]}", now
            )
        merged = merge(reports, self.epoch)
        self.state = GroupState.ACTIVE
        self.cause = ""
        self.divergence = None
        self._logs = None
        self._peers = tuple(self.members[rank].peer for rank in sorted(self.members))
        self.transfers.clear()
        self.stream.resume(merged.entries, merged.sequence)
        for operation in merged.in_doubt:
            self._count_decision(self.stream.abort(operation, Reason.IN_DOUBT, -1))
        self.rounds.resume(self.epoch, merged.round, merged.verdicts)
        effects: list[CoordinatorEffect] = [
            Note("activate", "", {"epoch": self._number, "fresh": merged.fresh, "in_doubt": len(merged.in_doubt)})
        ]
        for rank, member in sorted(self.members.items()):
            report = reports[rank]
            entries = [] if merged.fresh else self.stream.after(report.sequence) or []
            held = {verdict.round for verdict in report.verdicts}
            verdicts = [verdict for verdict in merged.verdicts if verdict.round not in held]
            activate = Activate(self.epoch, merged.history, entries, verdicts, merged.capacity, merged.round)
            effects.append(Send((member.peer,), activate))
        return effects

    def _lose(self, rank: Rank, cause: str, now: float) -> list[CoordinatorEffect]:
        """The member is gone: what was open ends now, in sequence, and the others are told."""
        member = self.members.pop(rank)
        del self._ranks[member.peer]
        effects: list[CoordinatorEffect] = [Note("member_lost", "", {"rank": rank, "cause": cause, "group": self.name})]
        if self.state is GroupState.ACTIVE:
            self._peers = tuple(self.members[other].peer for other in sorted(self.members))
            effects += [self._aborted(decision) for decision in self.stream.abort_all(Reason.RANK_LOST, rank)]
            if self.rounds.next_round is None:
                for completion in self.transfers.retract_all(rank):
                    effects += self._completed(completion)
        if self.state is not GroupState.GATHERING:
            self.state = GroupState.GATHERING
            self.cause = cause
            peers = tuple(self.members[other].peer for other in sorted(self.members))
            if peers:
                effects.append(Send(peers, Suspended(self.epoch, rank, cause)))
        if rank in self._contenders:
            peer, hello = self._contenders.pop(rank)
            effects += self._admit(peer, hello, now)
        return effects

    def _settle_contender(self, rank: Rank, now: float) -> list[CoordinatorEffect]:
        """The holder of this rank has just been heard: whoever else claims the rank is refused."""
        contender = self._contenders.pop(rank, None)
        if contender is None:
            return []
        peer, hello = contender
        held = self.members[rank].hello.incarnation
        refused = Refused("duplicate_rank", "incarnation", rank, hello.incarnation, rank, held)
        return [Send((peer,), refused), Note("join_refused", "", {"rank": rank, "field": "rank"})]

    def _mismatch(self, hello: Hello) -> Refused | None:
        rank = hello.rank
        if hello.version != PROTOCOL_VERSION:
            return Refused("version", "protocol_version", rank, hello.version, -1, PROTOCOL_VERSION)
        others = [member for other, member in sorted(self.members.items()) if other != rank]
        if others and hello.world_size != self.world_size:
            return Refused("mismatch", "world_size", rank, hello.world_size, others[0].hello.rank, self.world_size)
        if not 0 <= rank < hello.world_size:
            return Refused("range", "rank", rank, rank, -1, f"0 <= rank < {hello.world_size}")
        if others:
            reference = others[0].hello
            for field in sorted({*reference.fingerprint, *hello.fingerprint}):
                mine, theirs = hello.fingerprint.get(field, "absent"), reference.fingerprint.get(field, "absent")
                if mine != theirs:
                    return Refused("mismatch", field, rank, mine, reference.rank, theirs)
        return None

    # --- work -----------------------------------------------------------------------------------------------------

    def _frame(self, rank: Rank, frame: Frame, now: float) -> list[CoordinatorEffect]:
        closable = self.rounds.frame(rank, frame, now)
        if closable:
            return self._close_rounds(now)
        verdict = self.rounds.verdict(frame.round)
        if verdict is None:
            return []
        effects: list[CoordinatorEffect] = [Send((self.members[rank].peer,), verdict)]
        late = self.rounds.late_digests(frame.round)
        return effects + (self._compare(frame.round, late) if late else [])

    def _close_rounds(self, now: float) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = []
        for verdict, by_rank in self.rounds.close_ready(self.epoch, now):
            self.counters["rounds"] += 1
            for decision in verdict.decisions:
                self._count_decision(decision)
            for completion in verdict.completions:
                self.counters["completions" if completion.ok else "retractions"] += 1
            effects.append(self._everyone(verdict))
            if verdict.absent:
                effects.append(Note("round_without", "", {"round": verdict.round, "absent": verdict.absent}))
            effects += self._compare(verdict.round, by_rank)
        return effects

    def _vote(self, rank: Rank, message: StreamVote, now: float) -> list[CoordinatorEffect]:
        known = self.stream.decided(message.vote.operation)
        if known is not None:
            self.stream.vote(rank, message.vote, now)
            return [Send((self.members[rank].peer,), Numbered(self.epoch, known))]
        decided = self.stream.vote(rank, message.vote, now)
        if decided is None:
            return []
        decision = decided.decision
        if decision.outcome is Outcome.ABORT:
            return [self._aborted(decision)]
        self._count_decision(decision)
        if decided.kind in COPYING_KINDS:
            self.transfers.expect(decision.operation, decided.participants, now)
        return [self._everyone(Numbered(self.epoch, decision))]

    def _aborted(self, decision: Decision) -> CoordinatorEffect:
        self._count_decision(decision)
        return self._everyone(Numbered(self.epoch, decision))

    def _completed(self, completion: Completion) -> list[CoordinatorEffect]:
        self.counters["completions" if completion.ok else "retractions"] += 1
        return [self._everyone(Numbered(self.epoch, self.stream.complete(completion)))]

    def _fetch_entries(self, rank: Rank, message: FetchEntries, now: float) -> list[CoordinatorEffect]:
        entries = self.stream.after(message.sequence)
        if entries is None:
            return self._lose(rank, f"rank {rank} is further behind than decisions_kept_max", now)
        peer = (self.members[rank].peer,)
        return [Send(peer, Numbered(self.epoch, entry)) for entry in entries]

    # --- divergence -----------------------------------------------------------------------------------------------

    def _compare(self, round_number: int, by_rank: Mapping[Rank, int]) -> list[CoordinatorEffect]:
        if self.divergence is not None or len(set(by_rank.values())) <= 1:
            return []
        self.counters["divergences"] += 1
        self.divergence = Divergence(self.epoch, round_number, digests.sides(dict(by_rank)), "")
        self._logs = {}
        return [self._everyone(LogRequest(self.epoch, round_number))]

    def _log(self, rank: Rank, message: OperationLog) -> list[CoordinatorEffect]:
        if self._logs is None or self.divergence is None:
            self._ignore("unexpected")
            return []
        self._logs[rank] = message.events
        if len(self._logs) < self.world_size:
            return []
        operation = digests.first_difference(self._logs)
        self._logs = None
        self.divergence = msgspec.structs.replace(self.divergence, operation=operation)
        detail: dict[str, object] = {"round": self.divergence.round, "sides": self.divergence.sides}
        return [self._everyone(self.divergence), Note("divergence", operation, detail)]

    # --- small things ---------------------------------------------------------------------------------------------

    def _everyone(self, message: FromCoordinator) -> Send:
        return Send(self._peers, message)

    def _count_decision(self, decision: Decision) -> None:
        if decision.outcome is Outcome.COMMIT:
            self.counters["commits"] += 1
        else:
            self.counters["aborts"] += 1
            reason = str(decision.reason)
            self.aborts[reason] = self.aborts.get(reason, 0) + 1

    def _ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
