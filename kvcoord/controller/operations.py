"""What is known of one operation on one rank while it is open, and the list of them.

VOTED --commit--> COPYING --all landed--> (ended)
  |                  |
  +--abort--> (ended)+--retract--> RETRACTED --drained--> (ended)
"""

from collections.abc import Sequence
from enum import StrEnum

from kvcoord.controller.leases import Lease
from kvcoord.domain import OperationId, OperationKind, PageKey, Path, Reason, Tier
from kvcoord.index.results import Pin
from kvcoord.index.tails import Positions, TailPin
from kvcoord.memory.reservation import Reservation

Call = tuple[int, int]
"""(session, number of the call): who waits for an answer."""

Run = tuple[int, int]
"""(first, count): pages of a path."""


class Phase(StrEnum):
    VOTED = "voted"
    COPYING = "copying"
    RETRACTED = "retracted"


class Operation:
    """One open operation: pages `runs` of the path `keys`, copied to `tier`.

    `tails` are the positions of the pages that it moves in each pool that keeps only ends, whether or not they are in
    `runs`: with the reserved slots, which are in the same order, they are its page maps. `reservation` holds the
    destination slots, `pins` and `tail_pins` the source. `copy_open`: this rank's own copy runs. `fixed` are
    destination or source slots that belong to the engine and not to a pool of ours.
    """

    __slots__ = (
        "asked_by",
        "attempt",
        "copy_error",
        "copy_open",
        "deferred",
        "fixed",
        "holders",
        "id",
        "keys",
        "kind",
        "leases",
        "leaving",
        "pages",
        "participants",
        "path",
        "phase",
        "pins",
        "reservation",
        "runs",
        "serial",
        "source_doubtful",
        "source_slots",
        "spare",
        "tail_counts",
        "tail_pins",
        "tails",
        "tick",
        "tier",
    )

    def __init__(
        self,
        kind: OperationKind,
        serial: int,
        attempt: int,
        tier: Tier,
        keys: list[PageKey],
        runs: list[Run],
        tails: Positions = (),
    ) -> None:
        self.id: OperationId = f"{kind}/{serial}/{attempt}"
        self.kind = kind
        self.serial = serial
        self.attempt = attempt
        self.tier = tier
        self.keys = keys
        self.runs = runs
        self.tails = tails
        self.tail_counts: Sequence[int] = [len(positions) for positions in tails] if tails else ()
        """Slots that it takes in each pool that keeps only ends."""
        self.pages = sum(count for _, count in runs)
        self.phase = Phase.VOTED
        self.path = Path.VOTED
        self.tick = 0
        self.deferred = True
        self.participants = 0
        self.reservation: Reservation | None = None
        self.fixed: tuple[list[int], ...] | None = None
        self.source_slots: tuple[list[int], ...] = ()
        self.source_doubtful = False
        """Some rank could not copy what its source pages hold."""
        self.pins: list[Pin] = []
        self.tail_pins: list[TailPin] = []
        self.leases: list[Lease] = []
        self.holders = 0
        """Leases that still read its destination although it was retracted, or `spare`: the slots go back with the
        last of them."""
        self.spare: tuple[list[int], ...] = ()
        """Loaded slots of pages that were published by somebody else meanwhile."""
        self.leaving = False
        """Its source slots are freed when this rank's copy is over: the pages are leaving the device."""
        self.copy_open = False
        self.copy_error: Reason | None = None
        self.asked_by: Call | None = None
        """The call that is answered with the outcome."""

    @property
    def moves(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.pages) or any(self.tails)

    @property
    def extent(self) -> str:
        """How much it moves, for the digest."""
        return "+".join(map(str, (self.pages, *self.tail_counts))) if self.tails else str(self.pages)

    def page_keys(self) -> list[PageKey]:
        """The keys of the pages that it moves."""
        return [key for first, count in self.runs for key in self.keys[first : first + count]]

    def tail_keys(self) -> list[list[PageKey]]:
        """The keys of the pages that it moves in each pool that keeps only ends."""
        return [[self.keys[at] for at in positions] for positions in self.tails]

    def pages_of_tails(self) -> list[Run]:
        """Pages of which it moves nothing but tails."""
        moved = {at for first, count in self.runs for at in range(first, first + count)}
        return runs_of(sorted({at for positions in self.tails for at in positions} - moved))


def runs_of(positions: list[int]) -> list[Run]:
    """Ascending positions as (first, count)."""
    runs: list[Run] = []
    for at in positions:
        if runs and sum(runs[-1]) == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
    return runs
