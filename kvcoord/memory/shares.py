"""Which rank keeps which host page where several ranks hold the same bytes (MLA: one latent, replicated over TP).

Sets of `count` neighbouring ranks hold the same bytes. Their host slots are numbered through, alike on every rank of
the group: the first `share_slots` are in the memory of the first rank of each set, the next ones in that of the second.
It does not know what is in a slot.
"""

from collections.abc import Iterable

import msgspec

from kvcoord.domain import Rank


class Shares(msgspec.Struct, frozen=True):
    """The shares as `rank` sees them, in a group of `world_size`. `count` divides the ranks of a pipeline stage."""

    rank: Rank
    world_size: int
    count: int
    share_slots: int

    @property
    def own(self) -> int:
        """The share that this rank keeps."""
        return self.rank % self.count

    @property
    def holders(self) -> range:
        """The ranks that hold the same bytes, in the order of the shares that they keep."""
        first = self.rank - self.own
        return range(first, first + self.count)

    def share_of(self, slot: int) -> int:
        return slot // self.share_slots

    def place(self, slot: int) -> int:
        """Where the slot is in the memory of the rank that keeps it."""
        return slot % self.share_slots

    def keepers(self, slots: Iterable[int]) -> int:
        """The ranks that keep these slots, one in each set, as a participants mask."""
        shares = {slot // self.share_slots for slot in slots}
        mask = 0
        for rank in range(self.world_size):
            if rank % self.count in shares:
                mask |= 1 << rank
        return mask
