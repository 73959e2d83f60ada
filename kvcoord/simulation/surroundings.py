"""What a simulated process sees of the world around it. The world itself knows its processes; they do not know it."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvcoord.controller.worker import WorkerEffect
from kvcoord.protocol.effects import CoordinatorEffect
from kvcoord.protocol.local import Answer, Call, Failed
from kvcoord.simulation.agenda import Agenda
from kvcoord.simulation.memory import OpenCopy
from kvcoord.simulation.network import Network
from kvcoord.simulation.program import Program
from kvcoord.simulation.shape import Shape
from kvcoord.simulation.story import Story

Where = tuple[int, int, int]
"""History, step (-1 without lockstep) and number of the call within its step: the same on all ranks in lockstep."""


class Watchers(Protocol):
    """Who looks on. A process gives itself: `rank` and `coordinator` are the simulated ones."""

    def count(self, cause: str) -> None: ...

    def event(self, rank: Any, history: int, index: int, text: str) -> None: ...

    def sent(self, rank: Any, message: msgspec.Struct) -> None: ...

    def answered(self, rank: Any, where: Where, call: Call, answer: Answer) -> None: ...

    def failed(self, rank: Any, call: Call, failure: Failed) -> None: ...

    def read(self, rank: Any, what: object, wrong: str) -> None: ...

    def copy_started(self, rank: Any, copy: OpenCopy) -> None: ...

    def copy_ending(self, rank: Any, copy: OpenCopy) -> None: ...

    def before_rank(self, rank: Any, message: msgspec.Struct) -> Any: ...

    def after_message_down(
        self, rank: Any, message: msgspec.Struct, before: Any, effects: list[WorkerEffect]
    ) -> None: ...

    def before_coordinator(self, coordinator: Any, message: msgspec.Struct) -> Any: ...

    def after_message_up(
        self, coordinator: Any, message: msgspec.Struct, before: Any, effects: list[CoordinatorEffect]
    ) -> None: ...

    def after_rank(self, rank: Any) -> None: ...

    def after_coordinator(self, coordinator: Any) -> None: ...


class Surroundings(Protocol):
    """The world as processes and engines see it."""

    agenda: Agenda
    story: Story
    network: Network
    program: Program
    shape: Shape
    seed: int
    incarnations: int
    """Of all processes so far: the next one takes the next number."""
    activations: set[tuple[int, int]]
    drain_from: int | None

    @property
    def ranks(self) -> Sequence[Any]: ...

    @property
    def promises(self) -> Watchers: ...

    def new_session(self) -> int: ...

    def new_call(self) -> int: ...

    def supervise(self, rank: Any) -> None: ...

    def connecting(self, rank: Any) -> None: ...

    def lost_peer(self, index: int, peer: bytes) -> None: ...

    def lost_coordinator(self, index: int) -> None: ...
