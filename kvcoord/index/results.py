"""What the tree answers: a match, its segments, a pin, and its outline. Values without behaviour."""

from collections.abc import Sequence

import msgspec

from kvcoord.domain import PageKey, Tier
from kvcoord.index.node import Slots


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Pages `first` to `first + count` of the path, to be read from `tier`; `slots` is one list a pool of the tier."""

    tier: Tier
    first: int
    count: int
    slots: Slots


class Match(msgspec.Struct, frozen=True, gc=False):
    """The usable prefix of a path: its leading pages that are on a tier. A page on both tiers counts as device.

    Where pools keep only ends, what they have for the end of a prefix must be cached too; from the first page on of
    which that is on the host, pages count as host.
    """

    device_pages: int
    host_pages: int
    segments: list[Segment]

    @property
    def pages(self) -> int:
        return self.device_pages + self.host_pages


class Branch(msgspec.Struct, frozen=True, gc=False):
    """A run of pages below the branch at position `above` (-1: the root), and its slots if it is on the tier."""

    above: int
    keys: list[PageKey]
    slots: Slots | None


class Pin:
    """Pages that must stay on their tier until `unpin`. `slots` (one list a pool of the tier) are theirs meanwhile."""

    __slots__ = ("count", "first", "open", "path", "slots", "tier")

    def __init__(self, path: Sequence[PageKey], first: int, tier: Tier, slots: Slots) -> None:
        self.path = path
        self.first = first
        self.count = len(path) - first
        self.tier = tier
        self.slots = slots
        self.open = True
