"""One group on the coordinator: what its members agree on while they are all there.

Membership says who is there; the stream, the rounds and the transfers decide; this machine brings messages to them, and
what they decide to the members. It ends what is open when a member is lost, and takes up what the ranks know when all
have joined again.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvcoord.domain import OperationId, Outcome, Path, Rank, Reason
from kvcoord.protocol import digest as digests
from kvcoord.protocol.divergence import DivergenceWatch
from kvcoord.protocol.effects import CoordinatorEffect, Note, Send
from kvcoord.protocol.membership import GroupState, Member, Membership
from kvcoord.protocol.messages import (
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
    Refused,
    Rejoin,
    Report,
    StatusRequest,
    StreamAck,
    StreamVote,
    epoch_number,
)
from kvcoord.protocol.recovery import Merged, merge
from kvcoord.protocol.rounds import RoundTable
from kvcoord.protocol.stream import StreamTable
from kvcoord.protocol.transfers import TransferTable

_ACTIVE: Final = GroupState.ACTIVE
_IMMEDIATE: Final = Path.IMMEDIATE

__all__ = ["GroupLimits", "GroupMachine", "GroupState", "Member"]


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
    report_bytes_max: int = 1 << 20
    """How many bytes of entries, and of verdicts, a rank is told at once that has missed them."""


class GroupMachine:
    """Decides for one group. `step` takes a member's message; `tick` lets deadlines pass; both return effects."""

    def __init__(self, name: str, world_size: int, incarnation: int, limits: GroupLimits) -> None:
        self.membership = Membership(
            name, world_size, incarnation, limits.heartbeat_timeout_s, limits.prepare_timeout_s, self._end_work
        )
        everyone = (1 << world_size) - 1
        open_max, kept_max = limits.operations_open_max, limits.decisions_kept_max
        self.transfers = TransferTable(everyone, limits.copy_timeout_s, kept_max)
        self.stream = StreamTable(everyone, self.transfers, limits.vote_timeout_s, open_max, kept_max)
        self.rounds = RoundTable(world_size, self.transfers, limits.round_timeout_s, limits.rounds_kept_max, open_max)
        self.counters = {"completions": 0, "rounds": 0, "divergences": 0}
        self.decisions: dict[tuple[Path, Outcome, Reason | None], int] = {}
        """Decisions by how they came about (in a round, or in the stream), outcome and reason of an abort."""
        self.retractions: dict[Reason, int] = {}
        self._report_bytes_max = limits.report_bytes_max
        self._verdicts_held_max = 2 * limits.rounds_kept_max
        """A rank keeps up to 2 x lag + 2 of its own, and the lag is less than what is kept here."""
        self._incarnation = incarnation
        self._watch = DivergenceWatch(world_size, limits.heartbeat_timeout_s)
        self._lockstep = False
        self._pool_count = 0

    @property
    def name(self) -> str:
        return self.membership.name

    @property
    def world_size(self) -> int:
        return self.membership.world_size

    @property
    def state(self) -> GroupState:
        return self.membership.state

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    @property
    def cause(self) -> str:
        """Why the group does not work, empty when it does."""
        return self.membership.cause

    @property
    def members(self) -> dict[Rank, Member]:
        return self.membership.members

    @property
    def ignored(self) -> dict[str, int]:
        """Messages of members that changed nothing, by cause."""
        return self.membership.ignored

    @property
    def divergence(self) -> Divergence | None:
        """The divergence of this epoch; its operation is empty until the logs have come."""
        return self._watch.found

    # --- events ---------------------------------------------------------------------------------------------------

    def step(self, peer: bytes, message: FromRank, now: float) -> list[CoordinatorEffect]:
        """One message from a peer of this group."""
        if type(message) is Hello:
            return self.membership.hello(peer, message, now)
        rank = self.membership.rank_of(peer)
        if rank is None:
            self._ignore("unknown_peer")
            return [Send((peer,), Rejoin(self._incarnation))]
        self.membership.members[rank].last_heard = now
        if type(message) is Heartbeat:
            return self.membership.heartbeat(rank, message, self.stream.sequence)
        if type(message) is Accept:
            effects = self.membership.accept(rank, message, now)
            return effects + self._activate(now) if self.membership.complete() else effects
        if type(message) is Leave:
            return self.membership.leave(rank, now)
        if type(message) is StatusRequest:
            self._ignore("unexpected")
            return []
        if self.membership.state is not _ACTIVE or message.epoch != self.membership.epoch:
            self._ignore("stale_epoch")
            return []
        if type(message) is Frame:
            return self._frame(rank, message, now)
        if type(message) is StreamVote:
            return self._vote(rank, message, now)
        return self._work(rank, message, now)

    def holds(self, peer: bytes) -> bool:
        """Whether this peer is a member, or claims to be one and is being looked at."""
        return self.membership.holds(peer)

    def released(self) -> list[bytes]:
        """Peers that were let go since this was last asked, and do not belong here any more."""
        if not self.membership.released:
            return []
        peers, self.membership.released = self.membership.released, []
        return [peer for peer in peers if not self.membership.holds(peer)]

    def gone(self, peer: bytes, now: float) -> list[CoordinatorEffect]:
        """The transport says that nobody is there any more, or that its queue is full."""
        return self.membership.gone(peer, now)

    def probe(self) -> list[CoordinatorEffect]:
        """A word to every member, so that the transport notices which of them it cannot reach."""
        if not self.membership.peers:
            return []
        return [self._everyone(Alive(self.epoch, self._incarnation, self.stream.sequence))]

    def tick(self, now: float) -> list[CoordinatorEffect]:
        """Lets every deadline up to `now` pass."""
        effects = self.membership.tick(now)
        if self.state is not GroupState.ACTIVE:
            return effects
        effects += [self._numbered(decision) for decision in self.stream.expire(now)]
        effects += self._ended(self.transfers.expire(now))
        effects += self._close_rounds(now)
        return effects + self._diverged(self._watch.expire(now))

    def deadline(self) -> float | None:
        """When `tick` has something to do, None for never."""
        times = [self.membership.deadline()]
        if self.state is GroupState.ACTIVE:
            times += [self.stream.deadline(), self.rounds.deadline(), self.transfers.deadline(), self._watch.deadline()]
        return min((time for time in times if time is not None), default=None)

    # --- the group comes and goes ---------------------------------------------------------------------------------

    def _activate(self, now: float) -> list[CoordinatorEffect]:
        reports = self.membership.reports()
        odd = _misfit(reports)
        if odd is not None:
            return self.membership.refuse(odd.rank, odd, now)
        merged = merge(reports, self.epoch, self._verdicts_held_max, self._report_bytes_max)
        first = next(iter(reports.values()))
        self._lockstep, self._pool_count = first.lockstep, len(first.free)
        self._watch.begin()
        self.transfers.resume(merged.retracted)
        self.stream.resume(merged.entries, merged.sequence)
        aborts = [self.stream.abort(operation, Reason.IN_DOUBT, -1) for operation in merged.in_doubt]
        for decision in aborts:
            self._count(decision, Path.IMMEDIATE)
        self.rounds.resume(self.epoch, merged.round, merged.verdicts)
        held = [report.held for report in reports.values()] if merged.fresh else [0]
        number = epoch_number(self.epoch)
        detail = {"epoch": number, "fresh": merged.fresh, "in_doubt": len(merged.in_doubt)}
        effects: list[CoordinatorEffect] = [self._note("activate", "", detail)]
        effects += self.membership.activate(
            {rank: _activation(self.epoch, merged, aborts, report, held) for rank, report in reports.items()}
        )
        if merged.conflict is not None:
            found = Divergence(self.epoch, -1, merged.conflict.sides, merged.conflict.what)
            effects += self._diverged(self._watch.declare(found))
        return effects

    def _end_work(self, rank: Rank) -> list[CoordinatorEffect]:
        """The group is losing this rank. In lockstep, transfers go on: their acks are said again in the next epoch."""
        effects = self._diverged(self._watch.conclude())
        effects += [self._numbered(decision) for decision in self.stream.abort_all(Reason.RANK_LOST, rank)]
        return effects if self._lockstep else effects + self._ended(self.transfers.retract_all(rank))

    # --- work -----------------------------------------------------------------------------------------------------

    def _work(
        self, rank: Rank, message: StreamAck | FetchEntries | OperationLog, now: float
    ) -> list[CoordinatorEffect]:
        if type(message) is StreamAck:
            if message.ack.operation not in self.transfers and not self.stream.reaches(message.sequence):
                self._ignore("ack_too_old")
                return []
            completion = self.transfers.record(rank, message.ack, now)
            return [] if completion is None else self._ended([completion])
        if type(message) is FetchEntries:
            return self._fetch_entries(rank, message, now)
        return self._diverged(self._watch.log(rank, message))

    def _frame(self, rank: Rank, frame: Frame, now: float) -> list[CoordinatorEffect]:
        if len(frame.free) != self._pool_count:
            cause = (
                f"rank {rank} counts {len(frame.free)} pools in frame {frame.round}, the group has {self._pool_count}"
            )
            return self.membership.lose(rank, cause, now)
        closable = self.rounds.frame(rank, frame, now)
        effects = self._parted(frame.round) if self.rounds.parting else []
        if closable:
            return effects + self._close_rounds(now)
        if self.rounds.next_round is None or frame.round >= self.rounds.next_round:
            return effects
        verdict = self.rounds.verdict(frame.round)
        if verdict is not None:
            effects.append(Send((self.members[rank].peer,), verdict))
            late = self.rounds.late_digests(frame.round)
            return effects + (self._compare(frame.round, late, now) if late else [])
        if self.rounds.parting:
            return effects
        cause = f"rank {rank} is further behind than rounds_kept_max at round {frame.round}"
        return self.membership.lose(rank, cause, now)

    def _close_rounds(self, now: float) -> list[CoordinatorEffect]:
        """Verdicts go to the ranks whose frames were there; an absent one gets it as the answer to its frame."""
        effects: list[CoordinatorEffect] = []
        for verdict, by_rank in self.rounds.close_ready(self.epoch, now):
            self.counters["rounds"] += 1
            for decision in verdict.decisions:
                self._count(decision, Path.VOTED)
            for completion in verdict.completions:
                self._count_end(completion)
            if verdict.absent:
                present = tuple(self.members[rank].peer for rank in sorted(by_rank))
                effects.append(Send(present, verdict))
                effects.append(self._note("round_without", "", {"round": verdict.round, "absent": verdict.absent}))
            else:
                effects.append(self._everyone(verdict))
            effects += self._compare(verdict.round, by_rank, now)
        return effects

    def _vote(self, rank: Rank, message: StreamVote, now: float) -> list[CoordinatorEffect]:
        stream, operation = self.stream, message.vote.operation
        known = None
        if operation not in stream.open:
            known = stream.decided(operation)
            if known is None and not stream.votes_on(operation, message.sequence):
                self._ignore("vote_too_old")
                return []
        decision = stream.vote(rank, message.vote, now)
        if known is not None:
            return [Send((self.members[rank].peer,), Numbered(self.epoch, known))]
        return [] if decision is None else [self._numbered(decision)]

    def _ended(self, completions: Iterable[Completion]) -> list[CoordinatorEffect]:
        """Completions found outside a round: the next verdict tells them in lockstep, else the stream."""
        if self._lockstep:
            self.rounds.pending.extend(completions)
            return []
        return [self._numbered(self.stream.complete(completion)) for completion in completions]

    def _fetch_entries(self, rank: Rank, message: FetchEntries, now: float) -> list[CoordinatorEffect]:
        entries = self.stream.after(message.sequence)
        if entries is None:
            return self.membership.lose(rank, f"rank {rank} is further behind than decisions_kept_max", now)
        peer = (self.members[rank].peer,)
        return [Send(peer, Numbered(self.epoch, entry)) for entry in entries]

    # --- divergence -----------------------------------------------------------------------------------------------

    def _compare(self, round_number: int, by_rank: Mapping[Rank, int], now: float) -> list[CoordinatorEffect]:
        if not self._watch.differ(self.epoch, round_number, by_rank, now):
            return []
        return [self._everyone(LogRequest(self.epoch, round_number))]

    def _parted(self, round_number: int) -> list[CoordinatorEffect]:
        """Ranks that began at different rounds never close one together: that is a divergence of its own."""
        if self._watch.found is not None:
            return []
        parting = self.rounds.parting
        sides = digests.sides(parting)
        what = " against ".join(
            f"first round {parting[ranks[0]]} (ranks {','.join(map(str, ranks))})" for ranks in sides
        )
        return self._diverged(self._watch.declare(Divergence(self.epoch, round_number, sides, what)))

    def _diverged(self, divergence: Divergence | None) -> list[CoordinatorEffect]:
        if divergence is None:
            return []
        self.counters["divergences"] += 1
        detail = {"round": divergence.round, "sides": divergence.sides}
        return [self._everyone(divergence), self._note("divergence", divergence.operation, detail)]

    # --- small things ---------------------------------------------------------------------------------------------

    def _note(self, kind: str, operation: OperationId, detail: Mapping[str, object]) -> Note:
        return Note(kind, operation, {**detail, "group": self.name})

    def _everyone(self, message: FromCoordinator) -> Send:
        return Send(self.membership.peers, message)

    def _numbered(self, entry: Decision | Completion) -> CoordinatorEffect:
        """The next entry of the stream, to all."""
        if isinstance(entry, Decision):
            self._count(entry, _IMMEDIATE)
        else:
            self._count_end(entry)
        return self._everyone(Numbered(self.epoch, entry))

    def _count(self, decision: Decision, path: Path) -> None:
        key = (path, decision.outcome, decision.reason)
        self.decisions[key] = self.decisions.get(key, 0) + 1

    def _count_end(self, completion: Completion) -> None:
        """A retraction counts once, when its last copy is over."""
        if completion.ok:
            self.counters["completions"] += 1
        elif completion.drained:
            reason = completion.reason or Reason.COPY_FAILED
            self.retractions[reason] = self.retractions.get(reason, 0) + 1

    def _ignore(self, cause: str) -> None:
        self.membership.ignored[cause] = self.membership.ignored.get(cause, 0) + 1


def _activation(epoch: int, merged: Merged, aborts: list[Decision], report: Report, held: list[int]) -> Activate:
    """What one rank lacks, from what it reported. `held`: the host pages of each rank that may be kept."""
    entries = [entry for entry in (*merged.entries, *aborts) if entry.sequence > report.sequence and not merged.fresh]
    verdicts = [verdict for verdict in merged.verdicts if 0 <= report.verdict_next <= verdict.round]
    return Activate(epoch, merged.history, entries, verdicts, merged.capacity, merged.round, min(held), max(held))


def _misfit(reports: Mapping[Rank, Report]) -> Refused | None:
    """A rank whose pools or way of working are not those of the lowest rank: the fingerprints should have shown it."""
    reference, *_ = reports
    pools, lockstep = len(reports[reference].free), reports[reference].lockstep
    for rank, report in reports.items():
        if len(report.free) != pools:
            return Refused("mismatch", "pools", rank, len(report.free), reference, pools)
        if report.lockstep != lockstep:
            return Refused("mismatch", "lockstep", rank, str(report.lockstep), reference, str(lockstep))
    return None
