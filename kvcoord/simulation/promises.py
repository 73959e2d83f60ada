"""All ten checkers of one world. Each hook goes only to those that look at it."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvcoord.controller.worker import WorkerEffect
from kvcoord.protocol.effects import CoordinatorEffect
from kvcoord.protocol.local import Answer, Call, Failed
from kvcoord.simulation.coordinator import SimulatedCoordinator
from kvcoord.simulation.liveness import Bounded, Fencing, Liveness
from kvcoord.simulation.memory import OpenCopy
from kvcoord.simulation.outcomes import AgreementPromise, Blame, Order, Validity
from kvcoord.simulation.pages import Conservation, Quiescence, Visibility
from kvcoord.simulation.promise import Observed, Promise, Snapshot
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.surroundings import Where

PROMISES: Final[tuple[Callable[[Any], Promise], ...]] = (
    AgreementPromise,
    Validity,
    Order,
    Conservation,
    Quiescence,
    Visibility,
    Liveness,
    Fencing,
    Bounded,
    Blame,
)


class Promises:
    """`checks` counts what was looked at, by promise; `ignored` what reached nobody."""

    def __init__(self, world: Observed) -> None:
        self.all = [make(world) for make in PROMISES]
        self.checks = {promise.name: 0 for promise in self.all}
        self.ignored: dict[str, int] = {}
        self._event = self._wanting("event")
        self._sent = self._wanting("sent")
        self._answered = self._wanting("answered")
        self._failed = self._wanting("failed")
        self._read = self._wanting("read")
        self._copy_started = self._wanting("copy_started")
        self._copy_ending = self._wanting("copy_ending")
        self._before_rank = self._wanting("before_rank")
        self._before_coordinator = self._wanting("before_coordinator")
        self._after_rank = self._wanting("after_rank")
        self._after_coordinator = self._wanting("after_coordinator")
        self._world = world

    def _wanting(self, hook: str) -> list[Promise]:
        return [promise for promise in self.all if getattr(type(promise), hook) is not getattr(Promise, hook)]

    @property
    def operations(self) -> int:
        """Operations whose outcome some engine has learned."""
        return next(len(promise.outcomes) for promise in self.all if isinstance(promise, AgreementPromise))

    def count(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1

    def event(self, rank: SimulatedRank, history: int, index: int, text: str) -> None:
        self._world.story.applied(rank.name, text)
        for promise in self._event:
            self.checks[promise.name] += 1
            promise.event(rank, history, index, text)

    def sent(self, rank: SimulatedRank, message: msgspec.Struct) -> None:
        self._world.story.sent(rank.name, message)
        for promise in self._sent:
            promise.sent(rank, message)

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        self._world.story.answered(rank.name, call, answer)
        for promise in self._answered:
            self.checks[promise.name] += 1
            promise.answered(rank, where, call, answer)

    def failed(self, rank: SimulatedRank, call: Call, failure: Failed) -> None:
        self._world.story.answered(rank.name, call, failure)
        for promise in self._failed:
            promise.failed(rank, call, failure)

    def read(self, rank: SimulatedRank, what: object, wrong: str) -> None:
        for promise in self._read:
            self.checks[promise.name] += 1
            promise.read(rank, what, wrong)

    def copy_started(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        self._world.story.copy(rank.name, copy, "starts")
        for promise in self._copy_started:
            promise.copy_started(rank, copy)

    def copy_ending(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        self._world.story.copy(rank.name, copy, "fails" if copy.failing else "lands")
        for promise in self._copy_ending:
            self.checks[promise.name] += 1
            promise.copy_ending(rank, copy)

    def before_rank(self, rank: SimulatedRank, message: msgspec.Struct) -> list[tuple[Promise, Snapshot]]:
        self._world.story.received(rank.name, message)
        held = [(promise, promise.before_rank(rank, message)) for promise in self._before_rank]
        return [(promise, before) for promise, before in held if before is not None]

    def after_message_down(
        self,
        rank: SimulatedRank,
        message: msgspec.Struct,
        before: list[tuple[Promise, Snapshot]],
        effects: list[WorkerEffect],
    ) -> None:
        for promise, snapshot in before:
            self.checks[promise.name] += 1
            promise.after_message_down(rank, message, snapshot, effects)

    def before_coordinator(
        self, coordinator: SimulatedCoordinator, message: msgspec.Struct
    ) -> list[tuple[Promise, Snapshot]]:
        self._world.story.received(coordinator.name, message)
        held = [(promise, promise.before_coordinator(coordinator, message)) for promise in self._before_coordinator]
        return [(promise, before) for promise, before in held if before is not None]

    def after_message_up(
        self,
        coordinator: SimulatedCoordinator,
        message: msgspec.Struct,
        before: list[tuple[Promise, Snapshot]],
        effects: list[CoordinatorEffect],
    ) -> None:
        for promise, snapshot in before:
            self.checks[promise.name] += 1
            promise.after_message_up(coordinator, message, snapshot, effects)

    def after_rank(self, rank: SimulatedRank) -> None:
        for promise in self._after_rank:
            self.checks[promise.name] += 1
            promise.after_rank(rank)

    def after_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        for promise in self._after_coordinator:
            self.checks[promise.name] += 1
            promise.after_coordinator(coordinator)

    def watch(self) -> None:
        for promise in self.all:
            promise.watch()

    def finish(self) -> None:
        for promise in self.all:
            promise.finish()
        self.checks["liveness"] += 1
