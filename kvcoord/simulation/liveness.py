"""Promises about the group: Liveness, Fencing, Bounded."""

from collections.abc import Callable, Sized
from operator import attrgetter
from typing import Any, Final

import msgspec

from kvcoord.controller.effects import StartCopy
from kvcoord.controller.worker import WorkerEffect
from kvcoord.protocol.effects import CoordinatorEffect
from kvcoord.protocol.local import Advanced, Agreed, Answer, Call, Failed, Written
from kvcoord.protocol.messages import (
    Accept,
    Activate,
    Frame,
    Numbered,
    OperationLog,
    StreamAck,
    StreamVote,
    Suspended,
    Verdict,
)
from kvcoord.simulation.coordinator import SimulatedCoordinator
from kvcoord.simulation.promise import Observed, Promise, Snapshot
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.surroundings import Where

_EVENTS_BETWEEN_COUNTS: Final = 32

_DOWN: Final = (Activate, Numbered, Verdict, Suspended)
_UP: Final = (Accept, Frame, OperationLog, StreamAck, StreamVote)
"""What is said within an epoch."""


class Liveness(Promise):
    """With the coordinator and all ranks up, every operation ends within its deadline; else a typed error does."""

    name = "liveness"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        limits, lag = self.world.shape.timeouts, self.world.shape.group.lag
        self._limit_s = (
            limits.group_deadline_s
            + limits.copy_timeout_s
            + limits.vote_timeout_s
            + (lag + 1) * limits.round_timeout_s
            + limits.heartbeat_timeout_s
        )
        self._untold: dict[tuple[int, int], set[str]] = {}
        """Deferred operations without an outcome, by rank and history."""

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        """What is told later has to be told: outcomes of deferred votes come with a later step."""
        if isinstance(answer, Written | Agreed) and answer.outcome is None:
            operation = answer.operation if isinstance(answer, Written) else getattr(call, "operation", "")
            self._untold.setdefault((rank.number, where[0]), set()).add(_stem(operation))
        elif isinstance(answer, Advanced):
            untold = self._untold.get((rank.number, where[0]), set())
            untold.difference_update(_stem(outcome.operation) for outcome in answer.outcomes)

    def finish(self) -> None:
        for rank in self.world.ranks:
            untold = self._untold.get((rank.number, rank.machine.history))
            if untold:
                raise self.broken(f"{rank.name} was never told what became of {sorted(untold)}", sorted(untold)[0])

    def failed(self, rank: SimulatedRank, call: Call, failure: Failed) -> None:
        if failure.error in self.world.failures_allowed:
            return
        raise self.broken(f"{rank.name}: {type(call).__name__} raised {failure.error} {failure.fields}")

    def watch(self) -> None:
        now = self.world.agenda.now
        for rank in self.world.ranks:
            engine = rank.engine
            if engine is None or not rank.alive or rank.paused:
                continue
            for asked in engine.asked.values():
                waited_s = now - max(asked.at_s, rank.running_since)
                if waited_s > self._limit_s:
                    raise self.broken(f"{rank.name}: {type(asked.call).__name__} has waited for {waited_s:.1f} s")
                break


class Fencing(Promise):
    """Nothing from an old epoch or incarnation changes anything."""

    name = "fencing"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self._epochs: dict[tuple[int, int], int] = {}

    def before_rank(self, rank: SimulatedRank, message: msgspec.Struct) -> Snapshot | None:
        if isinstance(message, _DOWN) and message.epoch != rank.machine.epoch:
            self.world.promises.count("old_epoch_down")
            return self._of_rank(rank)
        return None

    def after_message_down(
        self, rank: SimulatedRank, message: msgspec.Struct, before: Snapshot, effects: list[WorkerEffect]
    ) -> None:
        if self._of_rank(rank) != before or any(isinstance(effect, StartCopy) for effect in effects):
            raise self.broken(f"{rank.name} took {message} of another epoch")

    def before_coordinator(self, coordinator: SimulatedCoordinator, message: msgspec.Struct) -> Snapshot | None:
        if not isinstance(message, _UP):
            return None
        group = coordinator.machine.groups.get("sim") if coordinator.machine else None
        if group is None or message.epoch == group.epoch:
            return None
        self.world.promises.count("old_epoch_up")
        return self._of_coordinator(coordinator)

    def after_message_up(
        self,
        coordinator: SimulatedCoordinator,
        message: msgspec.Struct,
        before: Snapshot,
        effects: list[CoordinatorEffect],
    ) -> None:
        if self._of_coordinator(coordinator) != before:
            raise self.broken(f"{coordinator.name} took {message} of another epoch")

    def after_rank(self, rank: SimulatedRank) -> None:
        key, epoch = (rank.number, rank.incarnation), rank.machine.epoch
        if epoch < self._epochs.get(key, 0):
            raise self.broken(f"{rank.name} went back to epoch {epoch}")
        self._epochs[key] = epoch

    def _of_rank(self, rank: SimulatedRank) -> Snapshot:
        machine = rank.machine
        return machine.stream.sequence, machine.rounds.last_verdict, machine.history, machine.epoch, machine.state

    def _of_coordinator(self, coordinator: SimulatedCoordinator) -> Snapshot:
        assert coordinator.machine is not None
        group = coordinator.machine.groups["sim"]
        return (
            group.state,
            group.epoch,
            group.stream.sequence,
            len(group.stream),
            len(group.transfers),
            group.rounds.next_round,
            group.rounds.missing(),
            [member.report for member in group.members.values()],
        )


class Bounded(Promise):
    """Memory of the coordinator and of a rank is bounded by configured limits."""

    name = "bounded"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        shape = self.world.shape
        limits, ranks, lag = shape.limits, shape.ranks, shape.group.lag
        kept, opened, rounds = limits.decisions_kept_max, limits.operations_open_max, limits.rounds_kept_max
        self._of_group = _sizes(
            {
                "stream.open": opened,
                "stream._log": kept,
                "stream._decided": kept,
                "transfers._retired": kept,
                "rounds._open": rounds + 1,
                "rounds._kept": rounds,
                "rounds._late_rounds": rounds,
                "membership.members": ranks,
                "membership._contenders": ranks,
                "membership.released": 0,
            }
        )
        self._of_rank = _sizes(
            {
                "stream._kept": kept,
                "stream._decided": kept,
                "stream._completed": kept,
                "rounds._frames": max(lag, 1),
                "rounds._verdicts": 2 * rounds,
            }
        )
        self._events = 0

    def after_rank(self, rank: SimulatedRank) -> None:
        self._events += 1
        if self._events % _EVENTS_BETWEEN_COUNTS:
            return
        self._check(rank.name, rank.machine, self._of_rank)

    def after_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        self._events += 1
        if self._events % _EVENTS_BETWEEN_COUNTS or coordinator.machine is None:
            return
        for group in coordinator.machine.groups.values():
            self._check(coordinator.name, group, self._of_group)
        if len(coordinator.machine._group_of) > 2 * self.world.shape.ranks:
            raise self.broken(f"{coordinator.name} remembers {len(coordinator.machine._group_of)} peers")

    def _check(self, name: str, machine: object, sizes: list[tuple[str, Callable[[Any], Sized], int]]) -> None:
        for path, held, limit in sizes:
            if len(held(machine)) > limit:
                raise self.broken(f"{name} holds {len(held(machine))} in {path}, the limit is {limit}")


def _stem(operation: str) -> str:
    """An operation without its attempt: a second one answers for the first."""
    return operation.rpartition("/")[0] or operation


def _sizes(limits: dict[str, int]) -> list[tuple[str, Callable[[Any], Sized], int]]:
    return [(path, attrgetter(path), limit) for path, limit in limits.items()]
