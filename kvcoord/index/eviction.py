"""Who goes first: the orders of eviction, and the queue that keeps the runs of one tier in that order.

The order is total: a sort key from use, then deeper pages first, then the page key. No order of arrival and no clock
of the machine enters it, so ranks with the same pages, uses and pins name the same page. Knows nothing of slots.
"""

import heapq
from typing import Final, Protocol

from kvcoord.index.node import EvictionEntry, Node

_STALE_ENTRIES_MIN: Final = 64


class Usage(Protocol):
    """How a page has been used: what an order may look at."""

    @property
    def tick(self) -> int:
        """The latest touch, by the caller's logical clock."""

    @property
    def hits(self) -> int:
        """The number of touches."""

    @property
    def priority(self) -> int:
        """The highest importance that a user of the page gave it."""


class EvictionOrder(Protocol):
    """Compares pages by use. The lowest sort key goes first; all keys of one order have the same length."""

    def sort_key(self, usage: Usage) -> tuple[int, ...]: ...


class LruOrder:
    """The least recently touched page goes first."""

    def sort_key(self, usage: Usage) -> tuple[int, ...]:
        return (usage.tick,)


class LfuOrder:
    """The least often touched page goes first, among equals the least recently touched one."""

    def sort_key(self, usage: Usage) -> tuple[int, ...]:
        return (usage.hits, usage.tick)


class PriorityOrder:
    """The least important page goes first, among equals the least recently touched one."""

    def sort_key(self, usage: Usage) -> tuple[int, ...]:
        return (usage.priority, usage.tick)


class EvictionQueue:
    """The runs of one tier whose last page may be evicted, the first to go on top.

    A heap whose entries are not removed when they become void, only passed over. It is rebuilt when more than half
    of it is void, so an update costs O(log n) on average and the memory follows the number of valid entries.
    """

    def __init__(self, tier_number: int, order: EvictionOrder) -> None:
        self._tier_number = tier_number
        self._order = order
        self._heap: list[EvictionEntry] = []
        self._valid_count = 0
        self._entry_count = 0

    @property
    def valid_count(self) -> int:
        return self._valid_count

    def place(self, node: Node) -> None:
        """Put the run where its use and its last page say, unless it is there already."""
        here = node.tiers[self._tier_number]
        sort_key = self._order.sort_key(node)
        old = here.entry
        if old is None:
            self._valid_count += 1
        elif old.sort_key == sort_key and old.key == node.keys[-1]:
            return
        here.entry = self.entry(sort_key, node, len(node.keys))
        heapq.heappush(self._heap, here.entry)
        self._rebuild_when_stale()

    def remove(self, node: Node) -> None:
        """The run's last page may not be evicted now. No effect when the run has no place."""
        here = node.tiers[self._tier_number]
        if here.entry is not None:
            here.entry = None
            self._valid_count -= 1
            self._rebuild_when_stale()

    def entry(self, sort_key: tuple[int, ...], node: Node, count: int) -> EvictionEntry:
        """An entry for the run as if only its first `count` pages were there. The number keeps entries comparable."""
        self._entry_count += 1
        return EvictionEntry(sort_key, 1 - node.depth - count, node.keys[count - 1], self._entry_count, node)

    def sort_key(self, node: Node) -> tuple[int, ...]:
        return self._order.sort_key(node)

    def first(self) -> EvictionEntry | None:
        """The valid entry that goes first."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry.node.tiers[self._tier_number].entry is entry:
                return entry
            heapq.heappop(heap)
        return None

    def take_first(self) -> EvictionEntry:
        """Take the entry that `first` has just named off the heap; `put_back` must follow."""
        return heapq.heappop(self._heap)

    def put_back(self, entries: list[EvictionEntry]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def _rebuild_when_stale(self) -> None:
        if len(self._heap) > 2 * self._valid_count + _STALE_ENTRIES_MIN:
            self._heap = [entry for entry in self._heap if entry.node.tiers[self._tier_number].entry is entry]
            heapq.heapify(self._heap)

    def is_bounded(self) -> bool:
        """Whether the heap holds every valid entry once and no more void ones than allowed."""
        valid = sum(entry.node.tiers[self._tier_number].entry is entry for entry in self._heap)
        return valid == self._valid_count and len(self._heap) <= 2 * self._valid_count + _STALE_ENTRIES_MIN
