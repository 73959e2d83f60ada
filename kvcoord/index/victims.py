"""Which pages of a tier go first when some must: a choice, page-exact, that changes nothing.

Works on the queue of runs and follows what would be exposed as pages go. Neither the choice nor the way the pages
are grouped depends on where runs happen to be split. Knows nothing of how pages are taken away.
"""

import heapq
from typing import TypeAlias

import msgspec

from kvcoord.domain import PageKey
from kvcoord.index.eviction import EvictionQueue
from kvcoord.index.node import EvictionEntry, Node, Slots

_Piece: TypeAlias = tuple[Node, int, int]
"""Pages [start, end) of a run."""


class Victim(msgspec.Struct, frozen=True, gc=False):
    """Adjacent pages of one path that go one after the other, the deepest first.

    `path` is the whole path down to the deepest of them, `first` the position of the topmost, `slots` (one list a
    pool of the tier) the slots of the pages from `first` on, in path order.
    """

    path: list[PageKey]
    first: int
    slots: Slots

    @property
    def count(self) -> int:
        return len(self.path) - self.first

    @property
    def keys(self) -> list[PageKey]:
        return self.path[self.first :]


def select_victims(queue: EvictionQueue, tier_number: int, count: int) -> list[Victim]:
    """The first `count` evictable pages (all when there are fewer), in the order in which they go.

    O(log n) for each run involved, whatever the number of cached pages.
    """
    return _victims(_Selection(queue, tier_number).take(count), tier_number)


class _Selection:
    """The state of one choice: what is left of runs already cut, and how many subtrees would be empty."""

    def __init__(self, queue: EvictionQueue, tier_number: int) -> None:
        self._queue = queue
        self._tier_number = tier_number
        self._taken: list[EvictionEntry] = []
        self._exposed: list[EvictionEntry] = []
        self._emptied: dict[Node, int] = {}

    def take(self, count: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        while count > 0 and (entry := self._next()) is not None:
            node = entry.node
            end = 1 - entry.minus_depth - node.depth
            start = end - min(self._pages_before_the_next(entry, end), count)
            pieces.append((node, start, end))
            count -= end - start
            if start:
                heapq.heappush(self._exposed, self._queue.entry(entry.sort_key, node, start))
            else:
                self._expose_above(node)
        self._queue.put_back(self._taken)
        return pieces

    def _next(self) -> EvictionEntry | None:
        queued = self._queue.first()
        if self._exposed and (queued is None or self._exposed[0] < queued):
            return heapq.heappop(self._exposed)
        if queued is not None:
            self._taken.append(self._queue.take_first())
        return queued

    def _pages_before_the_next(self, entry: EvictionEntry, count: int) -> int:
        """Pages of equal use go deepest first, so runs of equal use take turns."""
        rivals = [
            rival.minus_depth
            for rival in (self._queue.first(), *self._exposed[:1])
            if rival and rival.sort_key == entry.sort_key
        ]
        if not rivals:
            return count
        return min(count, max(1, min(rivals) - entry.minus_depth))

    def _expose_above(self, node: Node) -> None:
        """The whole run would be gone. Its nearest ancestor on the tier may have become a leaf of the tier."""
        above = node.parent
        while above is not None:
            emptied = self._emptied.get(above, 0) + 1
            self._emptied[above] = emptied
            here = above.tiers[self._tier_number]
            if emptied < here.resident_below:
                return
            if here.slots is not None:
                if not here.pins:
                    entry = self._queue.entry(self._queue.sort_key(above), above, len(above.keys))
                    heapq.heappush(self._exposed, entry)
                return
            above = above.parent


def _victims(pieces: list[_Piece], tier_number: int) -> list[Victim]:
    victims = []
    group: list[_Piece] = []
    for piece in pieces:
        if group and not _adjacent(piece, group[-1]):
            victims.append(_victim(group, tier_number))
            group = []
        group.append(piece)
    if group:
        victims.append(_victim(group, tier_number))
    return victims


def _adjacent(upper: _Piece, lower: _Piece) -> bool:
    """`upper` went right after `lower`. A run with a child on the tier still has all its pages, so its last is next."""
    if upper[0] is lower[0]:
        return upper[2] == lower[1]
    return lower[1] == 0 and lower[0].parent is upper[0]


def _victim(group: list[_Piece], tier_number: int) -> Victim:
    top, start, _ = group[-1]
    bottom, _, end = group[0]
    runs = [bottom.keys[:end]]
    above = bottom.parent
    while above is not None:
        runs.append(above.keys)
        above = above.parent
    path = [key for run in reversed(runs) for key in run]
    slots: list[list[int]] = []
    for node, first, last in reversed(group):
        held = node.tiers[tier_number].slots
        assert held is not None
        slots = slots or [[] for _ in held]
        for pool, more in zip(slots, held, strict=True):
            pool.extend(more[first:last])
    return Victim(path, top.depth + start, tuple(slots))
