"""What a checker of one promise may look at: everything that happens in a world, as it happens."""

from typing import Final, Protocol

import msgspec

from kvcoord.controller.worker import WorkerEffect
from kvcoord.domain import OperationId
from kvcoord.protocol.effects import CoordinatorEffect
from kvcoord.protocol.local import Answer, Call, Failed
from kvcoord.simulation.agenda import Agenda
from kvcoord.simulation.coordinator import SimulatedCoordinator
from kvcoord.simulation.memory import OpenCopy
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.shape import Shape
from kvcoord.simulation.story import Story
from kvcoord.simulation.surroundings import Watchers, Where
from kvcoord.simulation.violation import Violation

Snapshot = tuple[object, ...]


class Observed(Protocol):
    """The world as checkers see it."""

    agenda: Agenda
    story: Story
    shape: Shape
    ranks: list[SimulatedRank]
    faultless: bool
    failures_allowed: set[str]

    @property
    def promises(self) -> Watchers: ...


class Promise:
    """One checker. It overrides what it wants to see, and raises Violation. `world` is whole when a hook is called."""

    name: str = ""

    def __init__(self, world: Observed) -> None:
        self.world: Final = world

    def broken(self, detail: str, operation: OperationId = "") -> Violation:
        return Violation(self.name, detail, operation)

    def event(self, rank: SimulatedRank, history: int, index: int, text: str) -> None:
        """A rank has applied the event `text`, its `index`-th of this history."""

    def sent(self, rank: SimulatedRank, message: msgspec.Struct) -> None:
        """A rank says something to its coordinator."""

    def answered(self, rank: SimulatedRank, where: Where, call: Call, answer: Answer) -> None:
        """An engine has got an answer."""

    def failed(self, rank: SimulatedRank, call: Call, failure: Failed) -> None:
        """A call of an engine has raised."""

    def read(self, rank: SimulatedRank, what: object, wrong: str) -> None:
        """An engine has read pages that it holds; `wrong` says what was not right with them."""

    def copy_started(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        """A copy begins; its destination is not torn yet."""

    def copy_ending(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        """A copy is over; its destination is not written yet."""

    def before_rank(self, rank: SimulatedRank, message: msgspec.Struct) -> Snapshot | None:
        """A message reaches a rank. What is returned comes back when it has been taken."""
        return None

    def after_message_down(
        self, rank: SimulatedRank, message: msgspec.Struct, before: Snapshot, effects: list[WorkerEffect]
    ) -> None: ...

    def before_coordinator(self, coordinator: SimulatedCoordinator, message: msgspec.Struct) -> Snapshot | None:
        """A message reaches a coordinator."""
        return None

    def after_message_up(
        self,
        coordinator: SimulatedCoordinator,
        message: msgspec.Struct,
        before: Snapshot,
        effects: list[CoordinatorEffect],
    ) -> None: ...

    def after_rank(self, rank: SimulatedRank) -> None:
        """A rank has done one event."""

    def after_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        """A coordinator has done one event."""

    def watch(self) -> None:
        """From time to time."""

    def finish(self) -> None:
        """Everything has drained."""
