"""Broken variants of pools that keep only the end of a sequence."""

from typing import Any, Final

from kvcoord.controller.consensus import AgreedConsensus
from kvcoord.controller.room import Room
from kvcoord.domain import Tier
from kvcoord.index.tails import TailBook, Tails
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import Patch, Variant

_HYBRID: Final = Options(ranks=3, steps=24, fault_s=10.0, hybrid=True)


def _usable_without_ends() -> list[Patch]:
    return [(Tails, "usable", lambda self, keys, limit: limit)]


def _ends_unpinned() -> list[Patch]:
    def pin(self: Any, key: Any) -> int:
        slot: int = self.pages[key].slot
        return slot

    return [(TailBook, "pin", pin), (TailBook, "unpin", lambda self, key: None)]


def _ends_outlive_their_page() -> list[Patch]:
    return [(Tails, "drop", lambda self, tier, keys: tuple([[] for _ in self.windows]))]


def _ends_evicted_alone() -> list[Patch]:
    """How many go depends on how full this rank is."""
    original = Room._evict_tails

    def evict_tails(self: Any, tier: Tier, counts: list[int]) -> None:
        free = self._state.pools.free_tails(tier)
        original(self, tier, [count + more % 2 for count, more in zip(counts, free, strict=True)])

    return [(Room, "_evict_tails", evict_tails)]


def _digest_without_ends() -> list[Patch]:
    return [(Tails, "digest", property(lambda self: 0))]


def _ends_not_issued() -> list[Patch]:
    original = AgreedConsensus.issue

    def issue(self: Any, tier: Tier, pages: int, tails: Any = ()) -> None:
        original(self, tier, pages)

    return [(AgreedConsensus, "issue", issue)]


ENDS_VARIANTS: Final = (
    Variant(
        name="ends_ignored",
        breaks="a prefix is used without the window and the state of its end",
        make=_usable_without_ends,
        options=_HYBRID,
    ),
    Variant(
        name="ends_unpinned", breaks="the end of a running request may be evicted", make=_ends_unpinned, options=_HYBRID
    ),
    Variant(
        name="ends_outlive_pages",
        breaks="an evicted page leaves its slots in pools of ends behind",
        make=_ends_outlive_their_page,
        options=_HYBRID,
    ),
    Variant(
        name="ends_of_one_rank",
        breaks="how many ends are evicted depends on this rank's pool",
        make=_ends_evicted_alone,
        options=_HYBRID,
    ),
    Variant(
        name="digest_skips_ends",
        breaks="the digest does not cover the ends of prefixes",
        make=_digest_without_ends,
        options=_HYBRID,
    ),
    Variant(
        name="ends_not_in_the_ledger",
        breaks="what an operation takes of the pools of ends is not counted",
        make=_ends_not_issued,
        options=_HYBRID,
    ),
)
