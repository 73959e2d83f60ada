"""Pages of hybrid models: pools that keep every page of a sequence beside pools that keep only its end.

A *window* pool needs the last `window_pages` pages (sliding-window attention); a *state* pool keeps one state for the
sequence, which is a window of one page: the state after its last page. All pools of an operation are reserved together
or not at all, and which slot belongs to which page is fixed when they are. A prefix can be used only where every pool
has what it needs for exactly that prefix. It does not know layers, bytes, or who decides; `memory.reservation` holds
the slots.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvcoord.domain import PoolName
from kvcoord.errors import UsageError
from kvcoord.memory.reservation import Refusal, Reservation, reserve
from kvcoord.memory.slots import SlotPool


class PoolShare(msgspec.Struct, frozen=True):
    """What an operation takes of one pool: a slot for each of its last `window_pages` pages, 0: for all of them."""

    pool: SlotPool
    window_pages: int = 0

    def first(self, pages: int) -> int:
        """Position of the first of `pages` pages that has a slot in this pool."""
        return max(0, pages - self.window_pages) if self.window_pages else 0


class PageMap(msgspec.Struct, frozen=True):
    """Pages of one operation in one pool: page `first + i` is in `slots[i]`. `window_pages` as in `PoolShare`."""

    first: int
    slots: list[int]
    window_pages: int = 0

    def slot(self, page: int) -> int | None:
        """The slot of a page of the operation, None where this pool keeps none."""
        return self.slots[page - self.first] if self.first <= page < self.first + len(self.slots) else None

    def usable(self, landed: int, limit: int) -> int:
        """The longest prefix, in pages and up to `limit`, for which the first `landed` slots hold all that it needs.

        0 where there is none: a window that begins before this map's first page is not there.
        """
        prefix = min(limit, self.first + landed)
        needed_from = max(0, prefix - self.window_pages) if self.window_pages else 0
        return prefix if needed_from >= self.first else 0


class HybridReservation:
    """The slots of one operation over pools of different kinds, and the page map of each, by pool name."""

    __slots__ = ("maps", "pages", "reservation")

    def __init__(self, reservation: Reservation, pages: int, shares: Sequence[PoolShare]) -> None:
        self.reservation = reservation
        self.pages = pages
        self.maps = {
            share.pool.name: PageMap(share.first(pages), reservation.slots[share.pool.name], share.window_pages)
            for share in shares
        }

    def usable_prefix(self, landed: Mapping[PoolName, int], limit: int | None = None) -> int:
        """The longest prefix, in pages, that every pool can serve when its first `landed` slots hold what they should.

        Ranks agree on the minimum; one that cannot serve exactly that asks again with it as `limit`, until all can.
        Raises UsageError when a pool is not named.
        """
        if landed.keys() != self.maps.keys():
            raise UsageError("landed", sorted(landed), f"name each of the pools {sorted(self.maps)}")
        prefix = self.pages if limit is None else min(limit, self.pages)
        while True:
            shorter = min([held.usable(landed[name], prefix) for name, held in self.maps.items()], default=prefix)
            if shorter == prefix:
                return prefix
            prefix = shorter


def reserve_hybrid(shares: Sequence[PoolShare], pages: int, owner: str) -> HybridReservation | Refusal:
    """Reserve slots for `pages` pages, in each pool as many as it needs, or nothing at all.

    Raises UsageError, before anything is held, for a negative number of pages or a pool named twice.
    """
    if pages < 0:
        raise UsageError("pages", pages, "give a number >= 0")
    taken = reserve([(share.pool, pages - share.first(pages)) for share in shares], owner)
    return taken if isinstance(taken, Refusal) else HybridReservation(taken, pages, shares)
