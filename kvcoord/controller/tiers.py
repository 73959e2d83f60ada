"""The slot pools of both tiers of one rank. A page takes one slot in every pool of a tier, or none."""

from collections.abc import Sequence

from kvcoord.domain import PoolName, Tier
from kvcoord.errors import UsageError
from kvcoord.memory.reservation import Refusal, Reservation, reserve
from kvcoord.memory.slots import SlotPool

INDEX = "index"
"""Owner of slots whose pages are published."""

ENGINE = "engine"
"""Owner of device slots that the engine holds for pages not yet known to the index."""


class TierPools:
    """Device and host pools. Pool names in votes and reports are `device.kv`, `host.kv` and so on."""

    def __init__(self, names: Sequence[PoolName], device_pages: int, host_pages: int) -> None:
        self.names = tuple(names)
        self.device = [SlotPool(f"device.{name}", device_pages) for name in names]
        self.host = [SlotPool(f"host.{name}", host_pages) for name in names]

    def of(self, tier: Tier) -> list[SlotPool]:
        return self.device if tier is Tier.DEVICE else self.host

    def capacity(self, tier: Tier) -> int:
        """Pages that the tier holds when empty."""
        return min(pool.capacity for pool in self.of(tier))

    def free(self, tier: Tier) -> int:
        """Pages for which every pool of the tier has a free slot."""
        return min(pool.free_count for pool in self.of(tier))

    def free_counts(self) -> list[int]:
        """Free pages per pool, device pools first: as frames carry them."""
        return [pool.free_count for pool in self.device] + [pool.free_count for pool in self.host]

    def reserve(self, tier: Tier, pages: int, owner: str) -> Reservation | Refusal:
        """Slots for whole pages in every pool of the tier, or the shortfall per pool."""
        return reserve([(pool, pages) for pool in self.of(tier)], owner)

    def slots(self, tier: Tier, reservation: Reservation) -> tuple[list[int], ...]:
        """A reservation's slots in pool order."""
        return tuple([reservation.slots[pool.name] for pool in self.of(tier)])

    def check_owner(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str) -> None:
        """Raises UsageError, naming the first slot that is not `owner`'s or is named twice."""
        for pool, held in zip(self.of(tier), slots, strict=True):
            seen: set[int] = set()
            for slot in held:
                if slot in seen or not 0 <= slot < pool.capacity or pool.owner(slot) != owner:
                    raise UsageError(f"slots of {pool.name}", slot, "name slots from allocate, each once")
                seen.add(slot)

    def free_slots(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str) -> None:
        """Gives used slots back, one list per pool."""
        for pool, held in zip(self.of(tier), slots, strict=True):
            if held:
                pool.free(held, owner)

    def hand_over(self, tier: Tier, slots: Sequence[Sequence[int]], owner: str, new_owner: str) -> None:
        for pool, held in zip(self.of(tier), slots, strict=True):
            if held:
                pool.hand_over(held, owner, new_owner)
