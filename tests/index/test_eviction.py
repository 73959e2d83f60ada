import pytest

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.index.eviction import EvictionOrder, LfuOrder, LruOrder, PriorityOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.tree import RadixTree
from kvcoord.index.victims import Victim


def path(text: str) -> list[PageKey]:
    return block_page_keys([ord(letter) for letter in text])


def filled(order: EvictionOrder, *texts: str) -> RadixTree:
    """Each text inserted on the device at its own tick, 1, 2 ..., in slots that are never given twice."""
    tree = RadixTree(order)
    for tick, text in enumerate(texts, 1):
        tree.insert(path(text), 0, [[100 * tick + position for position in range(len(text))]], tick)
    return tree


def test_a_victim_is_a_run_with_its_path_and_slots() -> None:
    tree = filled(LruOrder(), "abcd")
    assert tree.evict(Tier.DEVICE, 3) == [Victim(path("abcd"), 1, ([101, 102, 103],))]
    assert tree.match(path("abcd")).pages == 1
    tree.check()


def test_keys_and_count_of_a_victim_are_those_of_its_pages_only() -> None:
    (victim,) = filled(LruOrder(), "abcd").evict(Tier.DEVICE, 3)
    assert (victim.count, victim.keys) == (3, path("abcd")[1:])


def test_eviction_takes_exactly_as_many_pages_as_asked_for_or_all_there_are() -> None:
    for count in range(12):
        tree = filled(LruOrder(), "abcd", "abxy", "mno")
        evictable = tree.evictable(Tier.DEVICE)
        assert evictable == 9
        assert sum(victim.count for victim in tree.evict(Tier.DEVICE, count)) == min(count, 9)
        assert tree.pages(Tier.DEVICE) == 9 - min(count, 9)
        tree.check()


def test_a_page_goes_only_after_all_pages_below_it() -> None:
    tree = filled(LruOrder(), "abc")
    tree.touch(path("ab"), 9)
    tree.insert(path("xyz"), 0, [[1, 2, 3]], tick=5)
    tree.insert(path("xyz"), 2, [[4]], tick=20)
    assert [victim.keys for victim in tree.evict(Tier.DEVICE, 4)] == [path("abc"), path("xyz")[2:]]


def test_the_least_recently_touched_goes_first() -> None:
    tree = filled(LruOrder(), "a", "b", "c")
    tree.touch(path("a"), 10)
    assert [victim.path for victim in tree.evict(Tier.DEVICE, 2)] == [path("b"), path("c")]


@pytest.mark.parametrize(("older", "newer"), [("b", "c"), ("c", "b")])
def test_the_least_often_touched_goes_first_and_among_equals_the_oldest(older: str, newer: str) -> None:
    tree = filled(LfuOrder(), "a", "b", "c")
    for tick in (10, 11):
        tree.touch(path("a"), tick)
    tree.touch(path(older), 12)
    tree.touch(path(newer), 13)
    assert [victim.path for victim in tree.evict(Tier.DEVICE, 3)] == [path(older), path(newer), path("a")]


def test_the_least_important_goes_first_and_importance_is_never_lost() -> None:
    tree = RadixTree(PriorityOrder())
    tree.insert(path("a"), 0, [[0]], tick=1, priority=2)
    tree.insert(path("b"), 0, [[1]], tick=2, priority=0)
    tree.insert(path("c"), 0, [[2]], tick=3, priority=1)
    tree.touch(path("a"), 4, priority=0)
    tree.touch(path("b"), 5, priority=1)
    assert [victim.path for victim in tree.evict(Tier.DEVICE, 3)] == [path("c"), path("b"), path("a")]


def test_an_evicted_page_that_comes_back_starts_without_hits() -> None:
    tree = filled(LfuOrder(), "a")
    for tick in (2, 3, 4):
        tree.touch(path("a"), tick)
    tree.evict(Tier.DEVICE, 1)
    tree.insert(path("b"), 0, [[7]], tick=5)
    tree.insert(path("a"), 0, [[8]], tick=6)
    tree.touch(path("b"), 7)
    assert tree.evict(Tier.DEVICE, 1)[0].path == path("a")


def test_use_is_kept_while_a_page_is_on_the_other_tier() -> None:
    tree = filled(LfuOrder(), "a")
    tree.touch(path("a"), 2)
    tree.publish_host(path("a"), 0, 1, [[0]])
    tree.evict(Tier.DEVICE, 1)
    tree.publish_device(path("a"), 0, 1, [[1]])
    tree.insert(path("b"), 0, [[2]], tick=9)
    assert tree.evict(Tier.DEVICE, 1)[0].path == path("b")


def test_recency_never_goes_back_when_a_completion_is_applied_late() -> None:
    tree = filled(LruOrder(), "a", "b")
    tree.touch(path("a"), 10)
    tree.publish_host(path("a"), 0, 1, [[0]], tick=1)
    assert tree.evict(Tier.DEVICE, 1)[0].path == path("b")


def test_pages_touched_in_the_same_tick_go_in_one_order_on_every_rank() -> None:
    """Scenario C: one rank saw a before b, the other b before a."""
    ranks = [RadixTree(LruOrder()), RadixTree(LruOrder())]
    for tree, texts in zip(ranks, (("am", "bn"), ("bn", "am")), strict=True):
        for text in texts:
            slot = ord(text[0])
            tree.publish_host(path(text), 0, 2, [[slot, slot + 100]], tick=3)
            tree.touch(path(text), 4)
    gone = [[victim.keys for victim in tree.evict(Tier.HOST, 2)] for tree in ranks]
    assert gone[0] == gone[1]
    assert ranks[0].digest == ranks[1].digest
    deepest = sorted([path("am")[1], path("bn")[1]])
    assert [keys[-1] for keys in gone[0]] == deepest


def test_of_equal_use_deeper_pages_go_first_across_branches() -> None:
    texts = ("abcde", "bcdef", "cdefg", "defgh", "xyz")
    tree = RadixTree(LruOrder())
    for number, text in enumerate(texts):
        tree.insert(path(text), 0, [[10 * number + position for position in range(len(text))]], tick=1)
    order = [key for victim in tree.evict(Tier.DEVICE, 23) for key in reversed(victim.keys)]
    depths = {key: depth for text in texts for depth, key in enumerate(path(text))}
    assert order == sorted(depths, key=lambda key: (-depths[key], key))


def test_selecting_changes_nothing_and_names_what_eviction_takes() -> None:
    tree = filled(LruOrder(), "abcd", "abxy", "mno", "mnp")
    pin = tree.pin(path("mno"), 0, 3, Tier.DEVICE)
    selected = tree.select(Tier.DEVICE, 5)
    tree.check()
    assert tree.select(Tier.DEVICE, 5) == selected
    assert tree.evict(Tier.DEVICE, 5) == selected
    tree.unpin(pin)
    assert tree.evict(Tier.DEVICE, 9)[-1].first == 0
    assert tree.pages(Tier.DEVICE) == 0


def test_tiers_are_evicted_independently() -> None:
    tree = filled(LruOrder(), "abcd")
    tree.publish_host(path("abcd"), 0, 4, [[0, 1, 2, 3]])
    tree.evict(Tier.DEVICE, 3)
    match = tree.match(path("abcd"))
    assert (match.device_pages, match.host_pages) == (1, 3)
    tree.evict(Tier.HOST, 4)
    assert (tree.pages(Tier.DEVICE), tree.pages(Tier.HOST)) == (1, 0)
    tree.check()


def test_a_device_page_above_host_pages_is_a_leaf_of_the_device() -> None:
    tree = filled(LruOrder(), "ab")
    tree.publish_host(path("abcd"), 2, 2, [[0, 1]], tick=5)
    assert tree.evictable(Tier.DEVICE) == 2
    assert tree.evict(Tier.DEVICE, 1) == [Victim(path("ab"), 1, ([101],))]
    assert tree.evict(Tier.HOST, 1) == [Victim(path("abcd"), 3, ([1],))]
    tree.check()


def test_a_pinned_page_protects_itself_and_the_pages_above_it_on_its_tier() -> None:
    tree = filled(LruOrder(), "abcdef")
    tree.publish_host(path("abcdef"), 0, 6, [[0, 1, 2, 3, 4, 5]])
    pin = tree.pin(path("abcdef"), 2, 2, Tier.DEVICE)
    assert pin.slots == ([102, 103],)
    assert (tree.evictable(Tier.DEVICE), tree.evictable(Tier.HOST)) == (2, 6)
    assert tree.evict(Tier.DEVICE, 9) == [Victim(path("abcdef"), 4, ([104, 105],))]
    tree.check()
    tree.unpin(pin)
    assert tree.evictable(Tier.DEVICE) == 4
    assert tree.evict(Tier.DEVICE, 9) == [Victim(path("abcd"), 0, ([100, 101, 102, 103],))]
    tree.check()


def test_a_split_leaves_both_parts_pinned_and_unpin_releases_both() -> None:
    """Scenario G: the run is split while its pages are being read."""
    tree = RadixTree(LruOrder())
    tree.publish_host(path("abcd"), 0, 4, [[0, 1, 2, 3]], tick=1)
    pin = tree.pin(path("abcd"), 0, 4, Tier.HOST)
    tree.publish_host(path("abx"), 2, 1, [[9]], tick=2)
    tree.touch(path("abc"), 3)
    tree.check()
    assert [victim.keys for victim in tree.evict(Tier.HOST, 9)] == [path("abx")[2:]]
    for first in range(4):
        with pytest.raises(UsageError):
            tree.retract_host(path("abcd"), first, 1)
    assert tree.match(path("abcd")).segments[0].slots == pin.slots == ([0, 1, 2, 3],)
    tree.unpin(pin)
    assert tree.evictable(Tier.HOST) == 4
    assert sum(victim.count for victim in tree.evict(Tier.HOST, 9)) == 4
    tree.check()


def test_pins_of_a_page_add_up() -> None:
    tree = filled(LruOrder(), "abcd")
    long = tree.pin(path("abcd"), 0, 4, Tier.DEVICE)
    short = tree.pin(path("abcd"), 0, 2, Tier.DEVICE)
    tree.unpin(long)
    assert tree.evictable(Tier.DEVICE) == 2
    tree.unpin(short)
    assert tree.evictable(Tier.DEVICE) == 4
    tree.check()


def test_a_page_above_and_below_other_pins_is_protected_once() -> None:
    tree = filled(LruOrder(), "abcd")
    upper = tree.pin(path("abcd"), 0, 2, Tier.DEVICE)
    lower = tree.pin(path("abcd"), 2, 1, Tier.DEVICE)
    assert tree.evictable(Tier.DEVICE) == 1
    tree.unpin(lower)
    assert tree.evictable(Tier.DEVICE) == 2
    tree.check()
    tree.unpin(upper)
    assert tree.evictable(Tier.DEVICE) == 4
    tree.check()


def test_a_page_published_above_a_pinned_one_is_protected_at_once() -> None:
    tree = RadixTree(LruOrder())
    tree.publish_device(path("abcd"), 2, 2, [[2, 3]])
    pin = tree.pin(path("abcd"), 2, 1, Tier.DEVICE)
    tree.publish_device(path("abcd"), 0, 2, [[0, 1]])
    assert tree.evictable(Tier.DEVICE) == 1
    tree.check()
    tree.retract_device(path("a"), 0, 1)
    tree.check()
    tree.unpin(pin)
    assert tree.evictable(Tier.DEVICE) == 3
    tree.check()


def test_a_pin_does_not_follow_changes_of_the_callers_list() -> None:
    tree = filled(LruOrder(), "abcd")
    keys = path("abcd")
    pin = tree.pin(keys, 0, 4, Tier.DEVICE)
    keys.clear()
    tree.unpin(pin)
    assert tree.evictable(Tier.DEVICE) == 4


def test_a_pin_released_twice_breaks_an_invariant_and_releases_nobody_elses() -> None:
    tree = filled(LruOrder(), "ab")
    first = tree.pin(path("ab"), 0, 2, Tier.DEVICE)
    tree.pin(path("ab"), 0, 2, Tier.DEVICE)
    tree.unpin(first)
    with pytest.raises(InvariantBroken):
        tree.unpin(first)
    assert tree.evictable(Tier.DEVICE) == 0
    tree.check()


def test_pinning_pages_that_are_not_on_the_tier_is_a_usage_error_and_pins_nothing() -> None:
    tree = filled(LruOrder(), "abcd")
    tree.publish_host(path("abcd"), 1, 1, [[0]])
    for first, count, tier in ((0, 2, Tier.HOST), (1, 2, Tier.HOST), (3, 2, Tier.DEVICE)):
        with pytest.raises(UsageError):
            tree.pin(path("abcde"), first, count, tier)
    assert (tree.evictable(Tier.HOST), tree.evictable(Tier.DEVICE)) == (1, 4)
    tree.check()


def test_retracting_a_pinned_page_is_a_usage_error() -> None:
    tree = filled(LruOrder(), "abcd")
    pin = tree.pin(path("abcd"), 2, 1, Tier.DEVICE)
    with pytest.raises(UsageError):
        tree.retract_device(path("abcd"), 0, 4)
    assert tree.pages(Tier.DEVICE) == 4
    tree.retract_device(path("abcd"), 3, 1)
    tree.unpin(pin)
    tree.check()


def test_the_queue_stays_small_however_often_a_page_is_touched() -> None:
    tree = filled(LruOrder(), "ab", "cd")
    for tick in range(10, 2000):
        tree.touch(path("ab"), tick)
    tree.check()


def test_page_by_page_eviction_leaves_one_run_on_the_host_not_many() -> None:
    keys = block_page_keys(range(200))
    tree = RadixTree(LruOrder())
    tree.insert(keys, 0, [list(range(200))], tick=1)
    tree.publish_host(keys, 0, 200, [list(range(200))])
    for _ in range(150):
        tree.evict(Tier.DEVICE, 1)
    assert [(segment.tier, segment.count) for segment in tree.match(keys).segments] == [
        (Tier.DEVICE, 50),
        (Tier.HOST, 150),
    ]
    assert tree.run_count == 2
    tree.check()
