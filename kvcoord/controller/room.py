"""Making room by agreed eviction: all ranks evict the same pages or none. DESIGN sections 4.1 (7) and 4.3.

In lockstep every rank has the same index and the same agreed capacity at this point, so each computes the same shortage
and the same victims without a message; the digest of the next frame proves it. Nothing is evicted unless it suffices.
"""

from collections.abc import Callable, Sequence

from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import PageKey, Tier
from kvcoord.index.victims import Victim

Demote = Callable[[list[Victim]], list[Victim]]
"""Takes over the device pages that are to be written back first; returns the others, whose slots are freed now."""


class Room:
    """Evicts published, unpinned pages of one tier. `demote` is asked before device slots are freed."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.demote: Demote | None = None

    def make(self, tier: Tier, pages: int, keys: Sequence[PageKey], *, at_least: int = 0) -> bool:
        """Whether `pages` more are covered, after evicting what is missing if that is possible.

        Pages of the path `keys` are not evicted. `at_least` pages are evicted, if there are so many, also when that
        does not cover: the shortfall that a vote has shown.
        """
        state = self._state
        short = pages - state.consensus.available(tier)
        if short <= 0 and not at_least:
            return True
        tree = state.tree
        pins = [tree.pin(keys, first, count, tier) for first, count in tree.resident(keys, tier)]
        evictable = tree.evictable(tier)
        if 0 < short <= evictable:
            self._evict(tier, max(short, min(at_least, evictable)))
        elif 0 < at_least <= evictable:
            self._evict(tier, at_least)
        for pin in pins:
            tree.unpin(pin)
        return state.consensus.available(tier) >= pages

    def evict(self, tier: Tier, pages: int) -> int:
        """Evicts up to `pages` pages because the engine asks for it. Returns how many went."""
        pages = min(pages, self._state.tree.evictable(tier))
        if pages:
            self._evict(tier, pages)
        return pages

    def _evict(self, tier: Tier, pages: int) -> None:
        state = self._state
        victims = state.tree.evict(tier, pages)
        state.counters.pages_evicted[tier] += pages
        state.digest.apply(f"evict {tier} {pages}")
        state.consensus.credit(tier, pages)
        if tier is Tier.DEVICE and self.demote is not None:
            victims = self.demote(victims)
        for victim in victims:
            state.pools.free_slots(tier, victim.slots, INDEX)
