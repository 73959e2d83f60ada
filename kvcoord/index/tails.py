"""Pools that keep only the end of a sequence: which pages have a slot there, on which tier, and which of them go first.

A *window* pool needs the last pages of a prefix, as many as its window is long; a *state* pool needs the state after
the last page, which is a window of one. So a prefix is usable only where each of these pools has what it needs for
exactly that prefix. A page has a slot here only while it is on that tier, and may lose it earlier: by an eviction of
its own.

Every page is used, pinned and evicted for itself, since a window is short. Costs follow the windows, never the number
of cached pages. Knows keys and slots; where the pages themselves are is the tree's to know.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import InvariantBroken
from kvcoord.index.eviction import EvictionOrder
from kvcoord.index.node import TIERS, Slots

_STALE_ENTRIES_MIN: Final = 64
_DIGEST_FACTOR: Final = 0x165667B19E3779F9
_DIGEST_MASK: Final = 2**64 - 1

Positions = tuple[list[int], ...]
"""Positions of pages in a path, ascending: one list for each pool."""

_Entry = tuple[tuple[int, ...], int, PageKey]
"""A page's place in the order of eviction: its use, then shallower pages first, then its key."""


class TailPage:
    """One page's slot in one pool on one tier, and its use. `entry` is its place in the order, None while pinned."""

    __slots__ = ("depth", "entry", "hits", "pins", "priority", "slot", "tick")

    def __init__(self, depth: int, slot: int, tick: int) -> None:
        self.depth = depth
        self.slot = slot
        self.tick = tick
        self.hits = 0
        self.priority = 0
        self.pins = 0
        self.entry: _Entry | None = None


class TailBook:
    """The pages that have a slot in one pool on one tier. `window` is how many the end of a prefix needs.

    Shallower pages of equal use go first: the longer a prefix, the more is lost with its end.
    """

    def __init__(self, window: int, order: EvictionOrder, digest_factor: int) -> None:
        self.window = window
        self.pages: dict[PageKey, TailPage] = {}
        self._order = order
        self._digest_factor = digest_factor
        self._key_sum = 0
        self._pinned_count = 0
        self._heap: list[_Entry] = []

    @property
    def digest(self) -> int:
        """A number that depends on the set of pages alone."""
        return self._key_sum * self._digest_factor

    @property
    def evictable(self) -> int:
        """Pages without a pin."""
        return len(self.pages) - self._pinned_count

    def publish(self, key: PageKey, depth: int, slot: int, tick: int) -> bool:
        """Whether the page takes the slot: not when it has one already, which then counts as used at `tick`."""
        page = self.pages.get(key)
        if page is None:
            page = self.pages[key] = TailPage(depth, slot, tick)
            self._key_sum += _word(key)
            self._place(key, page)
            return True
        page.tick = max(page.tick, tick)
        self._place(key, page)
        return False

    def touch(self, key: PageKey, tick: int, priority: int) -> None:
        """One hit more, if the page has a slot. Recency and priority only grow."""
        page = self.pages.get(key)
        if page is not None:
            page.hits += 1
            page.tick = max(page.tick, tick)
            page.priority = max(page.priority, priority)
            self._place(key, page)

    def pin(self, key: PageKey) -> int:
        """Keeps the page's slot until `unpin`; returns it. KeyError when it has none."""
        page = self.pages[key]
        page.pins += 1
        if page.pins == 1:
            self._pinned_count += 1
            page.entry = None
            self._rebuild_when_stale()
        return page.slot

    def unpin(self, key: PageKey) -> None:
        page = self.pages[key]
        page.pins -= 1
        if not page.pins:
            self._pinned_count -= 1
            self._place(key, page)

    def drop(self, key: PageKey) -> int:
        """Takes the page's slot away and returns it. InvariantBroken when it is pinned."""
        page = self.pages[key]
        if page.pins:
            raise InvariantBroken("a pinned page keeps its slots", f"{key.hex()} loses slot {page.slot}")
        del self.pages[key]
        self._key_sum -= _word(key)
        self._rebuild_when_stale()
        return page.slot

    def evict(self, count: int) -> list[int]:
        """Takes min(count, evictable) slots away, in order. The pages themselves stay where they are."""
        slots: list[int] = []
        while self._heap and len(slots) < count:
            entry = heapq.heappop(self._heap)
            page = self.pages.get(entry[2])
            if page is not None and page.entry is entry:
                slots.append(self.drop(entry[2]))
        return slots

    def check(self) -> None:
        """Count everything again, O(pages here). Raises InvariantBroken."""
        slots = {page.slot for page in self.pages.values()}
        pinned = sum(page.pins > 0 for page in self.pages.values())
        placed = {id(entry) for entry in self._heap}
        if len(slots) != len(self.pages):
            raise InvariantBroken("a slot holds one page", f"{len(slots)} slots for {len(self.pages)} pages")
        if pinned != self._pinned_count or any(page.pins < 0 for page in self.pages.values()):
            raise InvariantBroken("pins of a pool are counted", f"{self._pinned_count}, not {pinned}")
        for key, page in self.pages.items():
            due = None if page.pins else (self._order.sort_key(page), page.depth, key)
            if page.entry != due or (due is not None and id(page.entry) not in placed):
                raise InvariantBroken("a page stands in the queue where its use says, unless pinned", key.hex())
        if self._key_sum != sum(map(_word, self.pages)):
            raise InvariantBroken("the digest of a pool is that of its pages", f"window {self.window}")
        if len(self._heap) > 2 * self.evictable + _STALE_ENTRIES_MIN:
            raise InvariantBroken("the queue holds few void entries", f"{len(self._heap)} for {self.evictable}")

    def _place(self, key: PageKey, page: TailPage) -> None:
        if page.pins:
            return
        page.entry = (self._order.sort_key(page), page.depth, key)
        heapq.heappush(self._heap, page.entry)
        self._rebuild_when_stale()

    def _rebuild_when_stale(self) -> None:
        if len(self._heap) > 2 * self.evictable + _STALE_ENTRIES_MIN:
            self._heap = [held.entry for held in self.pages.values() if held.entry is not None]
            heapq.heapify(self._heap)


class TailPin:
    """Slots that stay with their pages until `unpin`: one list of keys and one of slots for each pool."""

    __slots__ = ("keys", "open", "slots", "tier")

    def __init__(self, tier: Tier, keys: tuple[list[PageKey], ...], slots: Slots) -> None:
        self.tier = tier
        self.keys = keys
        self.slots = slots
        self.open = True


class Tails:
    """The pools of both tiers that keep only ends, in the group's order."""

    def __init__(self, windows: Sequence[int], order: EvictionOrder) -> None:
        self.windows = tuple(windows)
        self._tiers = tuple([tuple(_books(self.windows, order, tier)) for tier in range(len(TIERS))])

    @property
    def digest(self) -> int:
        """Depends on which pages have a slot where, and on nothing else."""
        return sum([book.digest for books in self._tiers for book in books])

    def on(self, tier: Tier) -> tuple[TailBook, ...]:
        """The books of one tier, one for each pool."""
        return self._tiers[TIERS.index(tier)]

    def counts(self, tier: Tier) -> list[int]:
        """Pages that have a slot, by pool."""
        return [len(book.pages) for book in self.on(tier)]

    def usable(self, keys: Sequence[PageKey], limit: int) -> int:
        """The longest prefix of at most `limit` pages whose end has its slots, each on either tier."""
        pools = [(device.window, device.pages, host.pages) for device, host in zip(*self._tiers, strict=True)]
        prefix = limit
        while prefix:
            shorter = prefix
            for window, device, host in pools:
                for at in range(max(0, prefix - window), shorter):
                    key = keys[at]
                    if key not in device and key not in host:
                        # Every prefix from this page on, up to the one looked at, needs this page too.
                        shorter = at
                        break
            if shorter == prefix:
                break
            prefix = shorter
        return prefix

    def to_load(self, keys: Sequence[PageKey], prefix: int) -> Positions:
        """Pages at the end of a usable prefix whose slot is on the host and not on the device."""
        return tuple(
            [
                [at for at in positions if keys[at] not in book.pages]
                for book, positions in zip(self.on(Tier.DEVICE), self.ends(prefix), strict=True)
            ]
        )

    def touch(self, keys: Sequence[PageKey], tick: int, priority: int = 0) -> None:
        """Marks what the prefix `keys` needs as used at `tick`, on both tiers."""
        ends = self.ends(len(keys))
        for books in self._tiers:
            for book, positions in zip(books, ends, strict=True):
                for at in positions:
                    book.touch(keys[at], tick, priority)

    def pin(self, tier: Tier, keys: Sequence[PageKey], positions: Iterable[Iterable[int]]) -> TailPin:
        """Keeps the slots of these pages of the path. Pins add up. KeyError when one has no slot there."""
        pinned = tuple([[keys[at] for at in held] for held in positions])
        slots = tuple([[book.pin(key) for key in held] for book, held in zip(self.on(tier), pinned, strict=True)])
        return TailPin(tier, pinned, slots)

    def pin_there(self, tier: Tier, keys: Sequence[PageKey], positions: Iterable[Iterable[int]]) -> TailPin:
        """The same for those of these pages that have a slot there."""
        books = zip(self.on(tier), positions, strict=True)
        return self.pin(tier, keys, [[at for at in held if keys[at] in book.pages] for book, held in books])

    def ends(self, prefix: int) -> list[range]:
        """The pages that a prefix of so many pages needs, in each pool."""
        return [range(max(0, prefix - window), prefix) for window in self.windows]

    def unpin(self, pin: TailPin) -> None:
        """Releases a pin. InvariantBroken the second time."""
        if not pin.open:
            raise InvariantBroken("every pin is released once", f"slots {pin.slots} on {pin.tier} released again")
        pin.open = False
        for book, held in zip(self.on(pin.tier), pin.keys, strict=True):
            for key in held:
                book.unpin(key)

    def drop(self, tier: Tier, keys: Sequence[PageKey]) -> Slots:
        """These pages leave the tier: their slots go with them."""
        return tuple([[book.drop(key) for key in keys if key in book.pages] for book in self.on(tier)])


def _books(windows: Sequence[int], order: EvictionOrder, tier: int) -> list[TailBook]:
    """One book for each pool. A page that changes its pool or its tier changes the digest: the factors are odd."""
    first = tier * len(windows)
    factors = [_DIGEST_FACTOR * (2 * (first + number) + 1) & _DIGEST_MASK for number in range(len(windows))]
    return [TailBook(window, order, factor) for window, factor in zip(windows, factors, strict=True)]


def _word(key: PageKey) -> int:
    """The first word of a key, which is one of a cryptographic hash."""
    return int.from_bytes(key[:8], "little")
