"""The reference that a settled run must equal, page for page and tier for tier: write-through with plain LRU.

Knows nothing of ranks, copies, votes or trees: one request is over before the next begins.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcoord.domain import PageKey
from kvcoord.errors import UsageError


class ReferenceCache:
    """Two LRU lists of pages, one for each tier. A capacity is in pages; None never fills.

    A request names the pages of its prompt, root first, and is served in these steps:

    1. Match. The hits are the leading pages that are on device or on host; a page on both counts as device.
    2. Touch. The pages of the request become the most recent of each tier that holds them, deepest first, root last,
       so that a page is never evicted before its descendants.
    3. Allocate. The least recent device pages are evicted until the request fits. Then all its pages are on device:
       loaded back from host (where they stay too) or newly computed. An evicted page stays on host if it is there.
    4. Write through. The least recent host pages are evicted until the request fits. Then all its pages are on host:
       those that were not are copied.

    Pages of the request itself are never evicted for it. So a request longer than the device tier is served without
    caching: steps 1 and 2 only, no page enters or leaves either tier. One that fits the device but is longer than the
    host tier leaves out step 4 only.
    """

    def __init__(self, device_pages: int | None = None, host_pages: int | None = None) -> None:
        self.device = _Tier("device_pages", device_pages)
        self.host = _Tier("host_pages", host_pages)

    def request(self, keys: Sequence[PageKey]) -> tuple[int, int]:
        """Serve one request and return its (device hits, host hits) in pages. `keys` are distinct, root first."""
        device_hits = host_hits = 0
        for key in keys:
            if key in self.device.pages:
                device_hits += 1
            elif key in self.host.pages:
                host_hits += 1
            else:
                break
        self.device.touch(keys)
        self.host.touch(keys)
        if self.device.fits(keys):
            self.device.hold(keys)
            if self.host.fits(keys):
                self.host.hold(keys)
        return device_hits, host_hits


class _Tier:
    """The pages of one tier, least recent first."""

    def __init__(self, field: str, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise UsageError(field, capacity, "give a number of pages >= 0, or None for a tier that never fills")
        self.capacity = capacity
        self.pages: OrderedDict[PageKey, None] = OrderedDict()

    def fits(self, keys: Sequence[PageKey]) -> bool:
        return self.capacity is None or len(keys) <= self.capacity

    def touch(self, keys: Sequence[PageKey]) -> None:
        for key in reversed(keys):
            if key in self.pages:
                self.pages.move_to_end(key)

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Make room for `keys`, which fit and have been touched, then hold them all as the most recent."""
        missing = sum(key not in self.pages for key in keys)
        while self.capacity is not None and len(self.pages) + missing > self.capacity:
            self.pages.popitem(last=False)
        for key in reversed(keys):
            self.pages[key] = None
            self.pages.move_to_end(key)
