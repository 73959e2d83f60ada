"""Broken variants of the protocol's machines on the side of the coordinator, and of recovery."""

from typing import Any, Final

import msgspec

from kvcoord.domain import Reason
from kvcoord.protocol import group as group_module
from kvcoord.protocol import recovery
from kvcoord.protocol import rounds as rounds_module
from kvcoord.protocol.ballot import Ballot, Tally, ranks_in
from kvcoord.protocol.group import GroupMachine
from kvcoord.protocol.membership import Membership
from kvcoord.protocol.messages import Completion
from kvcoord.protocol.stream import StreamTable
from kvcoord.protocol.transfers import TransferTable
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import Patch, Variant

_STREAMING: Final = Options(ranks=3, steps=24, fault_s=10.0, lockstep=False)
_OLD: Final = Options(
    ranks=3, lockstep=False, faults=16, fault_kinds=("delay", "reorder", "repeat", "restart_engine", "pause_rank")
)
_LATE: Final = ("delay", "repeat", "reorder", "lose")
_LOCKSTEP: Final = Options(ranks=3, steps=24, fault_s=10.0, lockstep=True)


def _acks_counted() -> list[Patch]:
    original = TransferTable.record

    def record(self: Any, rank: int, ack: Any, now: float) -> Any:
        copying = self._open.get(ack.operation)
        if copying is not None and copying.acked >> rank & 1:
            rank = ranks_in(copying.participants & ~copying.acked)[0]
        return original(self, rank, ack, now)

    return [(TransferTable, "record", record)]


def _duplicate_votes_count() -> list[Patch]:
    original = Ballot.record

    def record(self: Any, rank: int, vote: Any) -> Tally:
        if rank in self._votes and self.missing():
            rank = self.missing()[0]
        return original(self, rank, vote)

    return [(Ballot, "record", record)]


def _majority_commits() -> list[Patch]:
    def complete(self: Any) -> bool:
        return bool(len(self.missing()) <= (self.participants.bit_count() - 1) // 2)

    return [(Ballot, "complete", property(complete))]


def _completes_at_first_ack() -> list[Patch]:
    original = TransferTable.record

    def record(self: Any, rank: int, ack: Any, now: float) -> Any:
        known = ack.operation in self._open
        found = original(self, rank, ack, now)
        if found is None and ack.ok and known and ack.operation in self._open:
            self._retire(ack.operation)
            return Completion(ack.operation, True)
        return found

    return [(TransferTable, "record", record)]


def _failed_copies_count_as_landed() -> list[Patch]:
    original = TransferTable.record

    def record(self: Any, rank: int, ack: Any, now: float) -> Any:
        return original(self, rank, msgspec.structs.replace(ack, ok=True), now)

    return [(TransferTable, "record", record)]


def _failed_copies_are_forgotten() -> list[Patch]:
    original = TransferTable.record

    def record(self: Any, rank: int, ack: Any, now: float) -> Any:
        found = original(self, rank, ack, now)
        return None if found is not None and not found.ok else found

    def expire(self: Any, now: float) -> list[Completion]:
        return []

    return [(TransferTable, "record", record), (TransferTable, "expire", expire)]


def _old_votes_are_counted() -> list[Patch]:
    original = GroupMachine.step

    def step(self: Any, peer: bytes, message: Any, now: float) -> Any:
        if type(message).__name__ in ("StreamVote", "StreamAck", "Frame"):
            message = msgspec.structs.replace(message, epoch=self.epoch)
        return original(self, peer, message, now)

    return [(GroupMachine, "step", step)]


def _known_commits_are_aborted() -> list[Patch]:
    original = recovery.merge

    def merge(reports: Any, epoch: int, verdicts_held_max: int, bytes_max: int) -> Any:
        merged = original(reports, epoch, verdicts_held_max, bytes_max)
        doubted = [operation for report in reports.values() for operation in report.in_doubt]
        return msgspec.structs.replace(merged, in_doubt=list(dict.fromkeys(doubted)))

    return [(group_module, "merge", merge)]


def _recovery_forgets_what_few_know() -> list[Patch]:
    """Each rank gets only what the least advanced one knows."""
    original = recovery.merge

    def merge(reports: Any, epoch: int, verdicts_held_max: int, bytes_max: int) -> Any:
        merged = original(reports, epoch, verdicts_held_max, bytes_max)
        known = min(report.sequence for report in reports.values())
        entries = [entry for entry in merged.entries if entry.sequence <= known]
        return msgspec.structs.replace(merged, entries=entries, sequence=known)

    return [(group_module, "merge", merge)]


def _activates_without_a_rank() -> list[Patch]:
    def complete(self: Any) -> bool:
        missing = [member for member in self.members.values() if member.report is None]
        return str(self.state) == "preparing" and len(missing) <= 1

    return [(Membership, "complete", complete)]


def _takes_back_a_lost_rank() -> list[Patch]:
    """The next life of a member takes its place in the running epoch, as if nothing had happened."""
    original = Membership._admit

    def admit(self: Any, peer: bytes, hello: Any, now: float) -> Any:
        member = self.members.get(hello.rank)
        if member is None or str(self.state) != "active":
            return original(self, peer, hello, now)
        self._ranks.pop(member.peer, None)
        self._ranks[peer] = hello.rank
        member.peer, member.hello, member.attach, member.last_heard = peer, hello, hello.attach, now
        self.peers = tuple(self.members[rank].peer for rank in sorted(self.members))
        return []

    return [(Membership, "_admit", admit)]


def _capacity_is_the_largest() -> list[Patch]:
    return [(rounds_module, "min", max)]


def _timeouts_blame_nobody() -> list[Patch]:
    original = StreamTable.abort

    def abort(self: Any, operation: str, reason: Any, rank: int, shortfall: Any = None) -> Any:
        return original(self, operation, reason, -1 if reason is Reason.VOTE_TIMEOUT else rank, shortfall)

    return [(StreamTable, "abort", abort)]


def _shortfalls_are_dropped() -> list[Patch]:
    original = Ballot.blame

    def blame(self: Any) -> Any:
        reason, rank, _ = original(self)
        return reason, rank, {}

    return [(Ballot, "blame", blame)]


def _decisions_are_kept_for_ever() -> list[Patch]:
    def remember(self: Any, decision: Any) -> None:
        self._decided[decision.operation] = decision

    return [(StreamTable, "_remember", remember)]


def _old_votes_decide_again() -> list[Patch]:
    def votes_on(self: Any, operation: str, sequence: int) -> bool:
        return True

    return [(StreamTable, "votes_on", votes_on)]


COORDINATOR_VARIANTS: Final = (
    Variant(name="acks_counted", breaks="acks are counted without saying whose", make=_acks_counted),
    Variant(name="duplicate_vote_counts", breaks="a vote that comes twice counts for two", make=_duplicate_votes_count),
    Variant(name="majority_commits", breaks="most votes are enough for COMMIT", make=_majority_commits),
    Variant(name="completes_at_second_ack", breaks="two acks complete an operation", make=_completes_at_first_ack),
    Variant(name="failed_copy_landed", breaks="a failed copy counts as landed", make=_failed_copies_count_as_landed),
    Variant(name="retract_forgotten", breaks="a failed copy is never retracted", make=_failed_copies_are_forgotten),
    Variant(
        name="old_vote_counted",
        breaks="a coordinator counts votes of an old epoch",
        make=_old_votes_are_counted,
        options=_OLD,
    ),
    Variant(
        name="known_commit_aborted",
        breaks="at recovery what one rank doubts is aborted although another knows its COMMIT",
        make=_known_commits_are_aborted,
        options=_STREAMING,
    ),
    Variant(
        name="recovery_by_the_least",
        breaks="at recovery only what all ranks know is kept",
        make=_recovery_forgets_what_few_know,
        options=_STREAMING,
    ),
    Variant(
        name="active_without_a_rank", breaks="an epoch begins before all have accepted", make=_activates_without_a_rank
    ),
    Variant(
        name="next_life_taken_for_the_last",
        breaks="a restarted rank goes on in the running epoch",
        make=_takes_back_a_lost_rank,
        options=Options(ranks=3, coordinators=1, faults=12, fault_kinds=("cut_down", "pause_coordinator")),
    ),
    Variant(
        name="capacity_of_the_largest",
        breaks="the group's capacity is the largest free count",
        make=_capacity_is_the_largest,
        options=_LOCKSTEP,
    ),
    Variant(name="nobody_blamed", breaks="a vote timeout names no rank", make=_timeouts_blame_nobody),
    Variant(name="shortfall_dropped", breaks="an abort does not say how short", make=_shortfalls_are_dropped),
    Variant(name="decisions_kept", breaks="decisions are remembered for ever", make=_decisions_are_kept_for_ever),
    Variant(
        name="decided_twice",
        breaks="a late vote opens an operation again that was decided and forgotten",
        make=_old_votes_decide_again,
        options=Options(ranks=3, fault_s=10.0, lockstep=False, faults=8, fault_kinds=_LATE, decisions_kept_max=6),
    ),
)
