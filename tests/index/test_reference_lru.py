"""Hits and victims of each tier equal those of a page-by-page LRU: a request touches its deepest page first."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.domain import PageKey, Tier
from kvcoord.index.eviction import LruOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.tree import RadixTree


class ReferenceTier:
    def __init__(self, page_count_max: int) -> None:
        self.page_count_max = page_count_max
        self.pages: OrderedDict[PageKey, None] = OrderedDict()

    def use(self, path: list[PageKey]) -> list[PageKey]:
        """Every page of the path becomes recent. Returns what had to go, in order."""
        for key in reversed(path):
            self.pages[key] = None
            self.pages.move_to_end(key)
        excess = max(0, len(self.pages) - self.page_count_max)
        return [self.pages.popitem(last=False)[0] for _ in range(excess)]


class TreeTiers:
    """The same two tiers, written through, on one tree."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.limits = {Tier.DEVICE: device_pages, Tier.HOST: host_pages}
        self.tree = RadixTree(LruOrder())
        self.slot = 0

    def request(self, path: list[PageKey], tick: int) -> tuple[int, int, dict[Tier, list[PageKey]]]:
        match = self.tree.match(path)
        self.tree.touch(path, tick)
        self.tree.insert(path, match.device_pages, [self.slots(len(path) - match.device_pages)], tick)
        for first, count in self.tree.unbacked(path):
            self.tree.publish_host(path, first, count, [self.slots(count)], tick)
        gone = {}
        for tier, limit in self.limits.items():
            victims = self.tree.evict(tier, max(0, self.tree.pages(tier) - limit))
            gone[tier] = [key for victim in victims for key in reversed(victim.keys)]
        return match.device_pages, match.host_pages, gone

    def slots(self, count: int) -> list[int]:
        self.slot += count
        return list(range(self.slot - count, self.slot))


requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(block_page_keys), min_size=10, max_size=60)


@given(requests, st.integers(8, 14), st.integers(8, 25))
@settings(max_examples=100, deadline=None)
def test_hits_and_victims_of_both_tiers_are_those_of_a_page_by_page_lru(
    played: list[list[PageKey]], device_pages: int, host_pages: int
) -> None:
    device, host = ReferenceTier(device_pages), ReferenceTier(host_pages)
    tiers = TreeTiers(device_pages, host_pages)
    for tick, path in enumerate(played, 1):
        on_device = leading(path, device)
        on_host = leading(path[on_device:], host)
        gone = {Tier.DEVICE: device.use(path), Tier.HOST: host.use(path)}
        assert tiers.request(path, tick) == (on_device, on_host, gone)
    tiers.tree.check()


def leading(path: list[PageKey], tier: ReferenceTier) -> int:
    return next((position for position, key in enumerate(path) if key not in tier.pages), len(path))
