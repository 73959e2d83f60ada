"""What calls return, as far as it is the same for the async and the blocking client. Pure: nothing here waits."""

import warnings
from typing import Protocol, TypeVar

import msgspec

from kvcoord.client.progress import Landing
from kvcoord.domain import OperationId
from kvcoord.errors import FrameMalformed, TransferFailed, UsageError
from kvcoord.protocol.local import Acquired, Answer, Loaded, Outcome, Slots

A = TypeVar("A", bound=Answer)


class Match(msgspec.Struct, frozen=True):
    """Leading pages of a path that are cached; a page on both tiers counts as device."""

    device_pages: int
    host_pages: int

    @property
    def pages(self) -> int:
        return self.device_pages + self.host_pages


class Allocation(msgspec.Struct, frozen=True):
    """Device slots of the engine, one list for each pool. Aborted: none."""

    outcome: Outcome
    slots: Slots

    def __bool__(self) -> bool:
        return bool(self.outcome)


class Holder(Protocol):
    """A client, as far as a lease knows it: what it holds ends with the session."""

    @property
    def closed(self) -> bool: ...

    def voided(self, number: int) -> bool:
        """Has the group begun anew since this call of the session was asked?"""


class Loading:
    """Pages that may still be on their way to the device. `landings`: copies that must land, the own the last."""

    __slots__ = ("landings", "operation", "outcome")

    def __init__(self, outcome: Outcome, operation: OperationId, landings: tuple[Landing, ...]) -> None:
        self.outcome = outcome
        self.operation = operation
        self.landings = landings

    def __bool__(self) -> bool:
        return bool(self.outcome)

    @property
    def error(self) -> str:
        """Why the pages are void, as far as is known: this rank's copy failed, or the group took the load-back back."""
        for landing in self.landings:
            if landing.retracted is not None:
                return str(landing.retracted)
            if landing.error is not None:
                return landing.error.cause if isinstance(landing.error, TransferFailed) else str(landing.error)
        return ""


class GrantedLease(Loading):
    """A path held on the device, or, when aborted, what was cached of it all the same.

    `slots` has one list for each pool, with a slot for every page of the path; in a pool that keeps only ends, -1 but
    for the last cached pages and the last of the path. The first `device_pages` + `host_pages` were cached, the rest is
    for the engine to compute. `loaded` are (first, count) runs that this lease loads. `number` is 0 when nothing is
    held.
    """

    __slots__ = ("_asked", "_holder", "device_pages", "host_pages", "loaded", "number", "released", "slots")

    def __init__(self, answer: Acquired, landings: tuple[Landing, ...], holder: Holder, asked: int) -> None:
        """`asked` is the number of the call."""
        super().__init__(answer.outcome, answer.operation, landings)
        self._holder = holder
        self._asked = asked
        self.number = answer.lease
        self.slots = answer.slots
        self.device_pages = answer.device_pages
        self.host_pages = answer.host_pages
        self.loaded = answer.loaded
        self.released = False

    @property
    def held(self) -> bool:
        """Not when aborted, no longer when released, or when the group began anew."""
        return self.number > 0 and not self.released and not self._holder.voided(self._asked)

    def __del__(self) -> None:
        if self.held and not self._holder.closed:
            warnings.warn(f"{self!r} was dropped before it was released", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}, {self.device_pages} on device, {self.host_pages} on host>"


class StartedLoad(Loading):
    """A load-back of `pages` pages into the first slots that were given for it."""

    __slots__ = ("pages",)

    def __init__(self, answer: Loaded, landings: tuple[Landing, ...]) -> None:
        super().__init__(answer.outcome, answer.operation, landings)
        self.pages = answer.pages

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.operation}, {self.pages} pages>"


def layers_needed(held: Loading, layer: int | None) -> int:
    """How many layers must have landed for `layer` to be there, None for all.

    Raises UsageError when there is no such layer, or nothing was loaded because it was aborted.
    """
    if not held.outcome:
        raise UsageError("outcome", str(held.outcome), "was aborted: nothing lands, look at the outcome first")
    layer_count = held.landings[0].layer_count
    if layer is None:
        return layer_count
    if type(layer) is not int or not 0 <= layer < layer_count:
        raise UsageError("layer", layer, f"there are layers 0 to {layer_count - 1}")
    return layer + 1


def expect(answer: Answer, kind: type[A]) -> A:
    """The answer, which can only be of this kind. Raises FrameMalformed: the worker speaks another protocol."""
    if isinstance(answer, kind):
        return answer
    raise FrameMalformed(f"answered with {type(answer).__name__} instead of {kind.__name__}", 0)
