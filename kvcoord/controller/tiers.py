"""The slot pools of both tiers of one rank. A page takes one slot in every pool of a tier, or none.

Pools that keep only the end of a sequence come after the others; *tails* are slots in these, one number or list each.
"""

from collections.abc import Sequence

import msgspec

from kvcoord.domain import PoolName, Reason, Shortfall, Tier
from kvcoord.errors import UsageError
from kvcoord.index.node import Slots
from kvcoord.memory.reservation import Refusal, Reservation, reserve
from kvcoord.memory.slots import SlotPool

INDEX = "index"
"""Owner of slots whose pages are published."""

ENGINE = "engine"
"""Owner of device slots that the engine holds for pages not yet known to the index."""


class TailPool(msgspec.Struct, frozen=True):
    """A pool that keeps the last `window` pages of a sequence, and its slots on this rank."""

    name: PoolName
    window: int
    device_slots: int
    host_slots: int


class TierPools:
    """Device and host pools. Pool names in votes and reports are `device.kv`, `host.kv` and so on.

    `names` are the pools in which every page has a slot; `tails` the others. Slots are one list for each pool, in this
    order; where lists are left out at the end, there is nothing for those pools. `host_pages` of each of `host_shares`
    ranks that keep them for each other.
    """

    def __init__(
        self,
        names: Sequence[PoolName],
        device_pages: int,
        host_pages: int,
        tails: Sequence[TailPool] = (),
        host_shares: int = 1,
    ) -> None:
        self.names = (*names, *[tail.name for tail in tails])
        self.page_pools = len(names)
        self.windows = tuple([tail.window for tail in tails])
        self.device = [SlotPool(f"device.{name}", device_pages) for name in names]
        self.device += [SlotPool(f"device.{tail.name}", tail.device_slots) for tail in tails]
        self.host = [SlotPool(f"host.{name}", host_pages * host_shares, host_shares) for name in names]
        self.host += [SlotPool(f"host.{tail.name}", tail.host_slots) for tail in tails]

    def of(self, tier: Tier) -> list[SlotPool]:
        return self.device if tier is Tier.DEVICE else self.host

    def free(self, tier: Tier) -> int:
        """Pages for which every pool of whole sequences has a free slot."""
        return min(pool.free_count for pool in self.of(tier)[: self.page_pools])

    def free_tails(self, tier: Tier) -> list[int]:
        return [pool.free_count for pool in self.of(tier)[self.page_pools :]]

    def free_counts(self) -> list[int]:
        """Free pages per pool, device pools first: as frames carry them."""
        return [pool.free_count for pool in self.device] + [pool.free_count for pool in self.host]

    def ends(self, pages: int) -> tuple[int, ...]:
        """The tails of a sequence of `pages` pages."""
        return tuple([min(window, pages) for window in self.windows]) if self.windows else ()

    def reserve(
        self, tier: Tier, pages: int, owner: str, tails: Sequence[int] = (), near: int = -1
    ) -> Reservation | Refusal:
        """Slots for whole pages and for these tails: in every pool of the tier, or the shortfall per pool.

        In a tier of shares they are near the slot that is named.
        """
        pools = self.of(tier)
        if near >= 0:
            return reserve([(pool, pages) for pool in pools], owner, near)
        if not self.windows:
            return reserve([(pool, pages) for pool in pools], owner)
        counts = [pages] * self.page_pools + list(tails or [0] * len(self.windows))
        return reserve(list(zip(pools, counts, strict=True)), owner)

    def slots(self, tier: Tier, reservation: Reservation) -> Slots:
        """A reservation's slots in pool order."""
        return tuple([reservation.slots[pool.name] for pool in self.of(tier)])

    def beside_pages(self, tails: Slots) -> Slots:
        """Slots of tails alone, in pool order."""
        return tuple([[] for _ in range(self.page_pools)]) + tails

    def shortfall(self, tier: Tier, missing: int, missing_tails: Sequence[int]) -> tuple[Reason, dict[PoolName, int]]:
        """What an abort says when so many pages and tails do not fit; numbers below 1 do."""
        counts = [missing] * self.page_pools + list(missing_tails)
        short = {pool.name: count for pool, count in zip(self.of(tier), counts, strict=True) if count > 0}
        return self.reason(tier, short), short

    def reason(self, tier: Tier, shortfall: Shortfall) -> Reason:
        """Which pools are too full: those of pages, or only those of tails."""
        if not any(pool.name in shortfall for pool in self.of(tier)[: self.page_pools]):
            return Reason.AUXILIARY_FULL
        return Reason.DEVICE_FULL if tier is Tier.DEVICE else Reason.HOST_FULL

    def missing(self, tier: Tier, shortfall: Shortfall) -> tuple[int, tuple[int, ...]]:
        """A shortfall as pages and tails."""
        counts = [shortfall.get(pool.name, 0) for pool in self.of(tier)]
        return max(counts[: self.page_pools]), tuple(counts[self.page_pools :])

    def check_owner(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str) -> None:
        """Raises UsageError, naming the first slot that is not `owner`'s or is named twice."""
        for pool, held in zip(self.of(tier), slots, strict=True):
            seen: set[int] = set()
            for slot in held:
                if slot in seen or not 0 <= slot < pool.capacity or pool.owner(slot) != owner:
                    raise UsageError(f"slots of {pool.name}", slot, "name slots from allocate, each once")
                seen.add(slot)

    def free_slots(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str) -> None:
        """Gives used slots back."""
        for pool, held in zip(self.of(tier), slots, strict=False):
            if held:
                pool.free(held, owner)

    def hand_over(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str, new_owner: str) -> None:
        for pool, held in zip(self.of(tier), slots, strict=False):
            if held:
                pool.hand_over(held, owner, new_owner)
