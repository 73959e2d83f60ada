"""The reference LRU: examples computed by hand, and its equality to a model that follows the rules page by page."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.domain import PageKey
from kvcoord.errors import UsageError
from kvcoord.load.reference import ReferenceCache
from kvcoord.load.trace import DEMO, read, statistics


def path(names: str) -> list[PageKey]:
    """One page for each letter. A key stands for its prefix, as chained keys do."""
    return [names[:depth].encode() for depth in range(1, len(names) + 1)]


def resident(pages: Sequence[PageKey] | dict[PageKey, None]) -> list[str]:
    return sorted(key.decode() for key in pages)


def test_the_second_request_hits_the_pages_it_shares_with_the_first() -> None:
    cache = ReferenceCache()
    assert cache.request(path("abcd")) == (0, 0)
    assert cache.request(path("abxy")) == (2, 0)
    assert cache.request(path("abcd")) == (4, 0)


def test_equal_letters_under_different_parents_are_different_pages() -> None:
    cache = ReferenceCache()
    cache.request(path("ab"))
    assert cache.request(path("cb")) == (0, 0)


def test_a_page_evicted_from_device_is_hit_on_host_and_loaded_back() -> None:
    cache = ReferenceCache(device_pages=2, host_pages=4)
    cache.request(path("ab"))
    cache.request(path("cd"))
    assert resident(cache.device.pages) == ["c", "cd"]
    assert resident(cache.host.pages) == ["a", "ab", "c", "cd"]
    assert cache.request(path("ab")) == (0, 2)
    assert resident(cache.device.pages) == ["a", "ab"]
    assert resident(cache.host.pages) == ["a", "ab", "c", "cd"]


def test_eviction_takes_the_deepest_page_of_the_oldest_path_first() -> None:
    cache = ReferenceCache(device_pages=5, host_pages=100)
    cache.request(path("abc"))
    cache.request(path("de"))
    cache.request(path("f"))
    assert resident(cache.device.pages) == ["a", "ab", "d", "de", "f"]
    cache.request(path("gh"))
    assert resident(cache.device.pages) == ["d", "de", "f", "g", "gh"]


def test_a_prefix_on_device_and_the_rest_on_host_are_counted_by_tier() -> None:
    cache = ReferenceCache(device_pages=3, host_pages=100)
    cache.request(path("abc"))
    cache.request(path("xy"))
    assert resident(cache.device.pages) == ["a", "x", "xy"]
    assert cache.request(path("abc")) == (1, 2)
    assert resident(cache.device.pages) == ["a", "ab", "abc"]


def test_a_request_touches_the_pages_it_hits_in_both_tiers() -> None:
    cache = ReferenceCache(device_pages=4, host_pages=4)
    cache.request(path("ab"))
    cache.request(path("cd"))
    cache.request(path("ab"))
    cache.request(path("ef"))
    assert resident(cache.device.pages) == ["a", "ab", "e", "ef"]
    assert resident(cache.host.pages) == ["a", "ab", "e", "ef"]


def test_pages_of_the_request_are_never_evicted_for_it() -> None:
    cache = ReferenceCache(device_pages=3, host_pages=3)
    cache.request(path("ab"))
    cache.request(path("x"))
    assert cache.request(path("abc")) == (2, 0)
    assert resident(cache.device.pages) == ["a", "ab", "abc"]
    assert resident(cache.host.pages) == ["a", "ab", "abc"]


def test_a_request_longer_than_the_device_tier_changes_nothing_but_recency() -> None:
    cache = ReferenceCache(device_pages=3, host_pages=100)
    cache.request(path("ab"))
    cache.request(path("x"))
    assert cache.request(path("abcd")) == (2, 0)
    assert resident(cache.device.pages) == ["a", "ab", "x"]
    assert resident(cache.host.pages) == ["a", "ab", "x"]
    cache.request(path("y"))
    assert resident(cache.device.pages) == ["a", "ab", "y"]


def test_a_request_longer_than_the_host_tier_is_cached_on_device_only() -> None:
    cache = ReferenceCache(device_pages=4, host_pages=2)
    cache.request(path("x"))
    cache.request(path("abc"))
    assert resident(cache.device.pages) == ["a", "ab", "abc", "x"]
    assert resident(cache.host.pages) == ["x"]
    assert cache.request(path("abc")) == (3, 0)


def test_a_page_on_device_that_host_evicted_is_written_to_host_again() -> None:
    cache = ReferenceCache(device_pages=4, host_pages=2)
    cache.request(path("ab"))
    cache.request(path("cd"))
    assert resident(cache.host.pages) == ["c", "cd"]
    assert cache.request(path("ab")) == (2, 0)
    assert resident(cache.host.pages) == ["a", "ab"]


def test_a_tier_without_pages_holds_nothing() -> None:
    no_host = ReferenceCache(device_pages=2, host_pages=0)
    assert [no_host.request(path(name)) for name in ("ab", "ab", "cd", "ab")] == [(0, 0), (2, 0), (0, 0), (0, 0)]
    no_device = ReferenceCache(device_pages=0, host_pages=2)
    assert [no_device.request(path("ab")) for _ in range(2)] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("field", ["device_pages", "host_pages"])
def test_a_negative_capacity_is_refused(field: str) -> None:
    with pytest.raises(UsageError) as refused:
        ReferenceCache(**{field: -1})
    assert refused.value.field == field


def test_without_limits_the_hits_are_those_of_pools_that_never_fill() -> None:
    requests = read(DEMO)
    cache = ReferenceCache()
    assert sum(sum(cache.request(request.keys)) for request in requests) == statistics(requests).pages_hit


class StampedModel:
    """The rules once more, in the slowest way: every page has a stamp, every victim is looked for in a sorted list."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.capacities = (device_pages, host_pages)
        self.tiers: tuple[dict[PageKey, int], dict[PageKey, int]] = ({}, {})
        self.tick = 0

    def request(self, keys: list[PageKey]) -> tuple[int, int]:
        self.tick += 1
        device, host = self.tiers
        matched = 0
        while matched < len(keys) and (keys[matched] in device or keys[matched] in host):
            matched += 1
        device_hits = sum(key in device for key in keys[:matched])
        for tier in self.tiers:
            tier.update({key: self.tick for key in keys[:matched] if key in tier})
        if self.put(0, keys):
            self.put(1, keys)
        return device_hits, matched - device_hits

    def put(self, which: int, keys: list[PageKey]) -> bool:
        tier, capacity = self.tiers[which], self.capacities[which]
        missing = [key for key in keys if key not in tier]
        victims = sorted((key for key in tier if key not in keys), key=lambda key: (tier[key], -len(key), key))
        shortfall = len(missing) - (capacity - len(tier))
        if shortfall > len(victims):
            return False
        for victim in victims[: max(shortfall, 0)]:
            self.evict(tier, victim)
        tier.update(dict.fromkeys(missing, self.tick))
        return True

    @staticmethod
    def evict(tier: dict[PageKey, int], victim: PageKey) -> None:
        assert not any(key.startswith(victim) and key != victim for key in tier), "a page with descendants is no victim"
        del tier[victim]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 8),
    st.integers(0, 12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=40),
)
def test_the_reference_equals_the_rules_followed_page_by_page(
    device_pages: int, host_pages: int, requests: list[str]
) -> None:
    cache, model = ReferenceCache(device_pages, host_pages), StampedModel(device_pages, host_pages)
    for names in requests:
        assert cache.request(path(names)) == model.request(path(names))
        assert resident(cache.device.pages) == resident(list(model.tiers[0]))
        assert resident(cache.host.pages) == resident(list(model.tiers[1]))
        assert len(cache.device.pages) <= device_pages
        assert len(cache.host.pages) <= host_pages
