import pytest

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.index.eviction import LruOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.results import Segment
from kvcoord.index.tree import RadixTree


def lru() -> RadixTree:
    return RadixTree(LruOrder())


def path(text: str) -> list[PageKey]:
    """Equal prefixes of two texts are equal prefixes of their paths."""
    return block_page_keys([ord(letter) for letter in text])


def test_an_empty_tree_matches_nothing() -> None:
    tree = lru()
    assert tree.match(path("abc")).pages == 0
    assert tree.match([]).segments == []
    assert tree.digest == 0
    tree.check()


def test_a_match_is_the_longest_published_prefix_with_its_slots() -> None:
    tree = lru()
    tree.insert(path("abcd"), 0, [[10, 11, 12, 13]], tick=1)
    for asked, pages in [("abcd", 4), ("abcdef", 4), ("abc", 3), ("abx", 2), ("axcd", 1), ("xbcd", 0)]:
        match = tree.match(path(asked))
        assert (match.pages, match.device_pages, match.host_pages) == (pages, pages, 0)
        assert match.segments == ([Segment(Tier.DEVICE, 0, pages, ([10, 11, 12, 13][:pages],))] if pages else [])
    tree.check()


def test_a_match_reads_from_the_device_what_is_on_both_tiers() -> None:
    tree = lru()
    tree.insert(path("abcd"), 0, [[0, 1, 2, 3]], tick=1)
    tree.publish_host(path("abcdef"), 2, 4, [[102, 103, 104, 105]])
    match = tree.match(path("abcdef"))
    assert (match.device_pages, match.host_pages, match.pages) == (4, 2, 6)
    assert match.segments == [Segment(Tier.DEVICE, 0, 4, ([0, 1, 2, 3],)), Segment(Tier.HOST, 4, 2, ([104, 105],))]
    tree.retract_device(path("abc"), 2, 1)
    assert [segment.tier for segment in tree.match(path("abcdef")).segments] == [
        Tier.DEVICE,
        Tier.HOST,
        Tier.DEVICE,
        Tier.HOST,
    ]
    tree.check()


def test_a_match_ends_at_the_first_page_that_is_on_no_tier() -> None:
    tree = lru()
    tree.insert(path("abcd"), 2, [[2, 3]], tick=1)
    assert tree.match(path("abcd")).pages == 0
    assert tree.pages(Tier.DEVICE) == 2
    tree.publish_host(path("a"), 0, 1, [[100]])
    assert tree.match(path("abcd")).pages == 1
    tree.insert(path("ab"), 0, [[0, 1]], tick=2)
    assert tree.match(path("abcd")).segments == [Segment(Tier.DEVICE, 0, 4, ([0, 1, 2, 3],))]
    tree.check()


def test_changing_a_match_changes_nothing_in_the_tree() -> None:
    tree = lru()
    tree.insert(path("ab"), 0, [[0, 1]], tick=1)
    tree.match(path("ab")).segments[0].slots[0].clear()
    assert tree.match(path("ab")).segments == [Segment(Tier.DEVICE, 0, 2, ([0, 1],))]
    tree.check()


def test_a_page_that_is_there_keeps_its_slot_and_the_offered_one_comes_back() -> None:
    tree = lru()
    assert tree.insert(path("abc"), 0, [[0, 1, 2]], tick=1) == ([],)
    assert tree.insert(path("abcde"), 1, [[21, 22, 23, 24]], tick=2) == ([21, 22],)
    assert tree.insert(path("abx"), 0, [[30, 31, 32]], tick=2) == ([30, 31],)
    assert tree.match(path("abcde")).segments[0].slots == ([0, 1, 2, 23, 24],)
    assert tree.publish_host(path("abc"), 0, 2, [[100, 101]]) == ([],)
    assert tree.publish_host(path("abc"), 1, 2, [[111, 112]]) == ([111],)
    tree.check()


def test_a_retracted_page_is_on_the_other_tier_or_nowhere() -> None:
    tree = lru()
    tree.insert(path("abcd"), 0, [[0, 1, 2, 3]], tick=1)
    tree.publish_host(path("abcd"), 0, 2, [[100, 101]])
    assert tree.retract_device(path("abcd"), 1, 3) == ([1, 2, 3],)
    match = tree.match(path("abcd"))
    assert (match.device_pages, match.host_pages) == (1, 1)
    assert tree.retract_host(path("ab"), 0, 2) == ([100, 101],)
    assert tree.match(path("abcd")).pages == 1
    tree.retract_device(path("a"), 0, 1)
    assert (tree.pages(Tier.DEVICE), tree.pages(Tier.HOST), tree.digest) == (0, 0, 0)
    tree.check()


def test_a_page_taken_from_the_middle_leaves_the_pages_below_it() -> None:
    tree = lru()
    tree.insert(path("abcd"), 0, [[0, 1, 2, 3]], tick=1)
    tree.retract_device(path("abcd"), 1, 2)
    tree.check()
    assert tree.match(path("abcd")).pages == 1
    assert tree.pages(Tier.DEVICE) == 2
    tree.retract_device(path("abcd"), 3, 1)
    tree.check()
    assert tree.insert(path("abcd"), 1, [[21, 22, 23]], tick=2) == ([],)


def test_every_page_of_a_hybrid_tier_has_a_slot_in_each_pool() -> None:
    tree = RadixTree(LruOrder(), device_pools=("kv", "index"), host_pools=("kv",))
    tree.insert(path("abc"), 0, [[0, 1, 2], [50, 51, 52]], tick=1)
    assert tree.insert(path("abd"), 0, [[3, 4, 5], [53, 54, 55]], tick=1) == ([3, 4], [53, 54])
    assert tree.match(path("abd")).segments[0].slots == ([0, 1, 5], [50, 51, 55])
    assert tree.retract_device(path("abc"), 1, 2) == ([1, 2], [51, 52])
    tree.check()


@pytest.mark.parametrize("slots", [[], [[0, 1]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3]]])
def test_slots_of_another_shape_are_a_usage_error_and_change_nothing(slots: list[list[int]]) -> None:
    tree = lru()
    with pytest.raises(UsageError) as caught:
        tree.insert(path("abc"), 0, slots, tick=1)
    assert caught.value.field == "slots"
    assert tree.pages(Tier.DEVICE) == 0
    tree.check()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, -1), (0, 4), (4, 0)])
def test_a_range_outside_the_path_is_a_usage_error(first: int, count: int) -> None:
    tree = lru()
    tree.insert(path("abc"), 0, [[0, 1, 2]], tick=1)
    with pytest.raises(UsageError):
        tree.publish_host(path("abc"), first, count, [[0] * max(count, 0)])
    with pytest.raises(UsageError):
        tree.retract_device(path("abc"), first, count)
    with pytest.raises(UsageError):
        tree.pin(path("abc"), first, count, Tier.DEVICE)
    tree.check()


def test_an_empty_range_is_allowed_and_changes_nothing() -> None:
    tree = lru()
    assert tree.insert(path("abc"), 3, [[]], tick=1) == ([],)
    assert tree.retract_host(path("abc"), 1, 0) == ([],)
    tree.unpin(tree.pin(path("abc"), 2, 0, Tier.HOST))
    assert tree.evict(Tier.DEVICE, 0) == []
    assert tree.match(path("abc")).pages == 0
    tree.check()


def test_what_is_not_a_page_key_is_refused_before_anything_changes() -> None:
    tree = lru()
    with pytest.raises(UsageError) as caught:
        tree.insert([b"short"], 0, [[0]], tick=1)
    assert caught.value.field == "keys"
    tree.check()


def test_a_tier_without_pools_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        RadixTree(LruOrder(), device_pools=())


def test_retracting_what_is_not_there_is_a_usage_error_and_changes_nothing() -> None:
    tree = lru()
    tree.insert(path("abc"), 0, [[0, 1, 2]], tick=1)
    digest = tree.digest
    for asked in ("abcd", "abx"):
        with pytest.raises(UsageError):
            tree.retract_device(path(asked), 0, len(asked))
    with pytest.raises(UsageError):
        tree.retract_host(path("abc"), 0, 1)
    assert (tree.pages(Tier.DEVICE), tree.digest) == (3, digest)
    tree.check()


def test_write_policies_find_what_is_not_on_the_host_and_was_touched_often_enough() -> None:
    tree = lru()
    keys = path("abcdef")
    tree.insert(keys, 0, [[0, 1, 2, 3, 4, 5]], tick=1)
    assert tree.unbacked(keys) == [(0, 6)]
    assert tree.unbacked(keys, hits_min=1) == []
    tree.touch(keys[:4], 2)
    tree.touch(keys[:2], 3)
    assert tree.unbacked(keys) == [(0, 6)]
    assert tree.unbacked(keys, hits_min=1) == [(0, 4)]
    assert tree.unbacked(keys, hits_min=2) == [(0, 2)]
    tree.publish_host(keys, 1, 2, [[100, 101]])
    assert tree.unbacked(keys) == [(0, 1), (3, 3)]
    assert tree.unbacked(path("abcdx")) == [(0, 1), (3, 1)]


def test_the_pages_of_a_path_on_one_tier_are_found_whatever_is_on_the_other() -> None:
    tree = lru()
    keys = path("abcdef")
    tree.insert(keys, 1, [[1, 2, 3, 4, 5]], tick=1)
    tree.publish_host(keys, 0, 2, [[0, 1]])
    tree.retract_device(keys, 3, 1)
    assert tree.resident(keys, Tier.DEVICE) == [(1, 2), (4, 2)]
    assert tree.resident(path("abcx"), Tier.DEVICE) == [(1, 2)]
    assert tree.resident(keys, Tier.HOST) == [(0, 2)]


def test_pages_touched_more_often_stay_apart_from_others_of_the_same_tick() -> None:
    tree = lru()
    tree.insert(path("ab"), 0, [[0, 1]], tick=1)
    tree.touch(path("a"), 1)
    tree.publish_host(path("ab"), 0, 2, [[0, 1]])
    tree.retract_host(path("ab"), 0, 2)
    assert tree.unbacked(path("ab"), hits_min=1) == [(0, 1)]


def test_pages_that_are_used_and_held_alike_are_one_run() -> None:
    tree = lru()
    tree.insert(path("ab"), 0, [[0, 1]], tick=1)
    tree.insert(path("abcd"), 2, [[2, 3]], tick=1)
    assert tree.run_count == 1
    tree.insert(path("abx"), 2, [[4]], tick=1)
    assert tree.run_count == 3
    tree.retract_device(path("abx"), 2, 1)
    assert tree.run_count == 1
    tree.unpin(tree.pin(path("abcd"), 1, 2, Tier.DEVICE))
    assert tree.run_count == 1
    tree.check()


def test_the_digest_depends_on_pages_and_tiers_and_on_nothing_else() -> None:
    one, other = lru(), lru()
    one.insert(path("abcd"), 0, [[0, 1, 2, 3]], tick=1)
    one.insert(path("abxy"), 2, [[4, 5]], tick=2)
    other.insert(path("abxy"), 0, [[9, 8, 7, 6]], tick=7)
    assert one.digest != other.digest
    for position in (3, 2):
        other.publish_device(path("abcd"), position, 1, [[position]], tick=position)
    assert one.digest == other.digest
    one.publish_host(path("ab"), 1, 1, [[0]])
    other.publish_host(path("ab"), 0, 1, [[0]])
    assert one.digest != other.digest
    one.retract_host(path("ab"), 1, 1)
    other.retract_host(path("ab"), 0, 1)
    assert one.digest == other.digest


def test_a_page_that_changes_its_tier_changes_the_digest() -> None:
    device, host = lru(), lru()
    device.publish_device(path("a"), 0, 1, [[0]])
    host.publish_host(path("a"), 0, 1, [[0]])
    assert device.digest != host.digest


def test_check_names_the_invariant_that_is_broken() -> None:
    tree = lru()
    tree.insert(path("ab"), 0, [[0, 1]], tick=1)
    tree.insert(path("ac"), 1, [[1]], tick=1)
    with pytest.raises(InvariantBroken) as caught:
        tree.check()
    assert caught.value.invariant == "a slot holds one page"
