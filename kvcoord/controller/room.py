"""Making room by agreed eviction: all ranks evict the same pages or none. DESIGN sections 4.1 (7) and 4.3.

What is missing in a pool that keeps only ends is made up there, after the slots that pages have taken along: their
pages stay.

In lockstep every rank has the same index and the same agreed capacity at this point, so each computes the same shortage
and the same victims without a message; the digest of the next frame proves it. Nothing is evicted unless it suffices.
"""

from collections.abc import Callable, Sequence

from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import PageKey, PoolName, Reason, Tier
from kvcoord.index.victims import Victim

Demote = Callable[[list[Victim]], list[Victim]]
"""Takes over the device pages that are to be written back first; returns the others, whose slots are freed now."""


class Room:
    """Evicts published, unpinned pages of one tier. `demote` is asked before device slots are freed."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.demote: Demote | None = None

    def make(
        self,
        tier: Tier,
        pages: int,
        keys: Sequence[PageKey],
        tails: Sequence[int] = (),
        *,
        at_least: int = 0,
        tails_at_least: Sequence[int] = (),
    ) -> bool:
        """Whether `pages` more, and these tails, are covered, after evicting what is missing if that is possible.

        Pages of the path `keys`, and what its end needs, are not evicted. `at_least` pages are evicted, if there are so
        many, also when that does not cover: the shortfall that a vote has shown.
        """
        state = self._state
        consensus, tree = state.consensus, state.tree
        short = pages - consensus.available(tier)
        tails_short = self._tails_short(tier, tails) if tree.hybrid else ()
        if short <= 0 and not at_least and not (tree.hybrid and any((*tails_short, *tails_at_least))):
            return True
        pins = [tree.pin(keys, first, count, tier) for first, count in tree.resident(keys, tier)]
        tail_pin = tree.tails.pin_there(tier, keys, tree.tails.ends(len(keys)))
        books = tree.tails.on(tier)
        evictable = tree.evictable(tier)
        enough = short <= evictable and all(
            missing <= book.evictable for missing, book in zip(tails_short, books, strict=True)
        )
        goals = [
            _goal(missing, least, book.evictable, enough=enough)
            for missing, least, book in zip(tails_short, tails_at_least or [0] * len(books), books, strict=True)
        ]
        goal = _goal(short, at_least, evictable, enough=enough)
        gone = self._evict(tier, goal) if goal else [0] * len(books)
        if any(goals):
            self._evict_tails(tier, [max(0, wanted - went) for wanted, went in zip(goals, gone, strict=True)])
        for pin in pins:
            tree.unpin(pin)
        tree.tails.unpin(tail_pin)
        return consensus.available(tier) >= pages and not (tree.hybrid and any(self._tails_short(tier, tails)))

    def evict(self, tier: Tier, pages: int) -> int:
        """Evicts up to `pages` pages because the engine asks for it. Returns how many went."""
        pages = min(pages, self._state.tree.evictable(tier))
        if pages:
            self._evict(tier, pages)
        return pages

    def shortfall(self, tier: Tier, pages: int, tails: Sequence[int]) -> tuple[Reason, dict[PoolName, int]]:
        """Why so much is not covered: the reason of an abort, and what is missing by pool."""
        missing = pages - self._state.consensus.available(tier)
        tails_missing = self._tails_short(tier, tails) if self._state.tree.hybrid else ()
        return self._state.pools.shortfall(tier, missing, tails_missing)

    def _tails_short(self, tier: Tier, tails: Sequence[int]) -> list[int]:
        """Tails that are not covered, 0 where all are."""
        available = self._state.consensus.available_tails(tier)
        return [max(0, count - free) for count, free in zip(tails or [0] * len(available), available, strict=True)]

    def _evict(self, tier: Tier, pages: int) -> list[int]:
        """Evicts whole pages. Returns how many tails went with them, by pool."""
        state = self._state
        victims = state.tree.evict(tier, pages)
        first = state.pools.page_pools
        gone = [
            sum([len(victim.slots[number]) for victim in victims])
            for number in range(first, first + len(state.pools.windows))
        ]
        state.counters.pages_evicted[tier] += pages
        state.digest.apply(f"evict {tier} {pages}")
        state.consensus.credit(tier, pages, gone)
        if tier is Tier.DEVICE and self.demote is not None:
            victims = self.demote(victims)
        for victim in victims:
            state.pools.free_slots(tier, victim.slots, INDEX)
        return gone

    def _evict_tails(self, tier: Tier, counts: list[int]) -> None:
        """Evicts tails whose pages stay. A prefix that ends there is no longer usable."""
        state = self._state
        books = state.tree.tails.on(tier)
        slots = tuple([book.evict(count) for book, count in zip(books, counts, strict=True)])
        state.digest.apply(f"evict {tier} tails {counts}")
        state.consensus.credit(tier, 0, [len(held) for held in slots])
        state.pools.free_slots(tier, state.pools.beside_pages(slots), INDEX)


def _goal(short: int, at_least: int, evictable: int, *, enough: bool) -> int:
    """How many of one pool are to go: what is missing if all pools have enough to give, else what a vote has shown."""
    if enough and short > 0:
        return max(short, min(at_least, evictable))
    return at_least if 0 < at_least <= evictable else 0
