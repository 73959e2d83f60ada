"""What a coordinator shows of itself: the one source of its `/status`, `/metrics` and of `kvcoord status`.

Everything is read from the machines when somebody asks. What a forgotten group had counted is kept, so that the
counters of the process only grow.
"""

from collections.abc import Iterable, Mapping

import kvcoord
from kvcoord.domain import Rank
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.observability.snapshot import (
    CoordinatorSnapshot,
    DecisionKey,
    GroupSnapshot,
    RankSnapshot,
    decision_counts,
    histogram_of,
)
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.group import GroupMachine, GroupState
from kvcoord.protocol.messages import epoch_number


class CoordinatorStatus:
    """Turns a coordinator's machine into snapshots. `ranks_lost` counts lost ranks by group, and is pruned here."""

    def __init__(self, machine: CoordinatorMachine, recorder: FlightRecorder) -> None:
        self.ranks_lost: dict[str, int] = {}
        self._machine = machine
        self._recorder = recorder
        self._seen: dict[str, GroupMachine] = {}
        self._forgotten: dict[str, int] = {}

    def snapshot(
        self,
        now: float,
        *,
        uptime_s: float,
        not_ready: str,
        received: Mapping[str, int],
        dropped: Mapping[str, int],
        joins_refused: Mapping[str, int],
    ) -> CoordinatorSnapshot:
        """The coordinator at this moment. `dropped` are messages that the transport did not hand over, by cause."""
        return CoordinatorSnapshot(
            version=kvcoord.__version__,
            incarnation=f"{self._machine.incarnation:010x}",
            uptime_s=uptime_s,
            ready=not not_ready,
            ready_reason=not_ready,
            received={name: count for name, count in received.items() if count},
            ignored=self._ignored(dropped),
            events_recorded=self._recorder.recorded,
            events_dropped=self._recorder.dropped,
            groups=[self._group(group, now) for _, group in sorted(self._machine.groups.items())],
            joins_refused=dict(joins_refused),
        )

    def _group(self, group: GroupMachine, now: float) -> GroupSnapshot:
        ready = group.state is GroupState.ACTIVE
        return GroupSnapshot(
            name=group.name,
            state=group.state.value,
            ready=ready,
            reason="" if ready else _reason(group),
            epoch=epoch_number(group.epoch),
            world_size=group.world_size,
            ranks=_ranks(group, now),
            round=max(0, (group.rounds.next_round or 0) - 1),
            rounds_closed=group.counters["rounds"],
            round_close=histogram_of(group.rounds.close_times),
            operations_open=len(group.stream) + len(group.transfers),
            free_pages=_free_pages(group),
            decisions=decision_counts(_decisions(group)),
            retractions={reason.value: count for reason, count in group.retractions.items()},
            divergences=group.counters["divergences"],
            ranks_lost=self.ranks_lost.get(group.name, 0),
        )

    def _ignored(self, dropped: Mapping[str, int]) -> dict[str, int]:
        groups = self._machine.groups
        for name, group in self._seen.items():
            if groups.get(name) is not group:
                _add(self._forgotten, _ignored_by(group))
        self._seen = dict(groups)
        self.ranks_lost = {name: count for name, count in self.ranks_lost.items() if name in groups}
        total = dict(self._machine.ignored)
        _add(total, [self._forgotten, dropped])
        for group in groups.values():
            _add(total, _ignored_by(group))
        return total


def _ignored_by(group: GroupMachine) -> list[Mapping[str, int]]:
    acks = {"ack": group.transfers.ignored} if group.transfers.ignored else {}
    return [group.ignored, group.stream.ignored, group.rounds.ignored, acks]


def _add(total: dict[str, int], parts: Iterable[Mapping[str, int]]) -> None:
    for part in parts:
        for cause, count in part.items():
            if count:
                total[cause] = total.get(cause, 0) + count


def _reason(group: GroupMachine) -> str:
    missing = [rank for rank in range(group.world_size) if rank not in group.members]
    if missing:
        shown = ",".join(map(str, missing[:16])) + (",..." if len(missing) > 16 else "")
        return f"waiting for ranks {shown} of {group.world_size}: {group.cause}"
    return group.cause or "ranks are accepting a new epoch"


def _ranks(group: GroupMachine, now: float) -> list[RankSnapshot]:
    """Every rank of the group, also those that are missing."""
    rounds = group.rounds
    next_round = rounds.next_round or 0
    waited_for = set(rounds.missing())
    begun = rounds.deadline() is not None
    shown = []
    for rank in range(group.world_size):
        member = group.members.get(rank)
        if member is None:
            shown.append(RankSnapshot(rank=rank, state="missing"))
            continue
        sent_next = begun and rank not in waited_for
        shown.append(
            RankSnapshot(
                rank=rank,
                state=_rank_state(group, rank),
                last_heard_s=max(0.0, now - member.last_heard),
                round=max(0, next_round if sent_next else next_round - 1),
                incarnation=f"{member.hello.incarnation:x}",
            )
        )
    return shown


def _rank_state(group: GroupMachine, rank: Rank) -> str:
    if group.state is GroupState.PREPARING:
        return "accepted" if group.members[rank].report is not None else "preparing"
    return "active" if group.state is GroupState.ACTIVE else "waiting"


def _free_pages(group: GroupMachine) -> dict[str, int]:
    """Per pool the agreed capacity of the last verdict; empty before the first."""
    if group.rounds.next_round is None or not group.members:
        return {}
    verdict = group.rounds.verdict(group.rounds.next_round - 1)
    if verdict is None:
        return {}
    names = _pool_names(group, len(verdict.capacity))
    return dict(zip(names, verdict.capacity, strict=True))


def _pool_names(group: GroupMachine, count: int) -> list[str]:
    """The pools as the ranks' configuration names them. Capacities come tier by tier: device pools, then host pools."""
    first = group.members[min(group.members)]
    names = str(first.hello.fingerprint.get("pools", "")).split(",")
    if len(names) * 2 == count:
        return [f"{tier}.{name}" for tier in ("device", "host") for name in names]
    return names if len(names) == count else [str(index) for index in range(count)]


def _decisions(group: GroupMachine) -> dict[DecisionKey, int]:
    """Covered operations are not among them: no coordinator hears of their decision."""
    return {(None, path, outcome, reason): count for (path, outcome, reason), count in group.decisions.items()}
