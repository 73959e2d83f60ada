"""Pools that keep only the end of a sequence, against a model that searches all pages for every answer."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import InvariantBroken
from kvcoord.index.eviction import EvictionOrder, LfuOrder, LruOrder, PriorityOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.tails import TailPin
from kvcoord.index.tree import RadixTree

WINDOWS = (3, 1)

PATH = block_page_keys(range(1, 9))

tiers = st.sampled_from(list(Tier))


def tree_with(tier: Tier = Tier.DEVICE, windows: Sequence[int] = WINDOWS) -> RadixTree:
    """All of PATH on one tier, without any end."""
    tree = RadixTree(LruOrder(), ("kv",), ("kv",), windows)
    publish(tree, tier, PATH, range(len(PATH)))
    return tree


def publish(tree: RadixTree, tier: Tier, path: Sequence[PageKey], slots: Sequence[int], tick: int = 0) -> None:
    act = tree.publish_device if tier is Tier.DEVICE else tree.publish_host
    act(path, 0, len(path), [list(slots)], tick)


def give(tree: RadixTree, tier: Tier, window: Sequence[int], state: Sequence[int], tick: int = 0) -> None:
    """Slots to these pages of PATH: a page's position is its slot."""
    at = (list(window), list(state))
    assert tree.publish_tails(tier, PATH, at, at, tick) == ([], [])


@pytest.mark.parametrize(
    ("window", "state", "usable"),
    [
        ([5, 6, 7], [7], 8),
        ([5, 7], [7], 0),
        ([5, 6, 7], [], 0),
        ([5, 6, 7], [6], 0),
        ([0, 1, 5, 6, 7], [1, 4], 2),
        ([0, 1, 2, 3, 4], [4], 5),
        ([0], [0], 1),
    ],
)
def test_a_prefix_is_usable_when_its_own_end_is_there(window: list[int], state: list[int], usable: int) -> None:
    tree = tree_with()
    give(tree, Tier.DEVICE, window, state)
    assert tree.match(PATH).pages == usable
    assert tree.touch(PATH, 1) == usable


def test_the_slots_of_an_end_may_be_on_either_tier() -> None:
    tree = tree_with()
    publish(tree, Tier.HOST, PATH, range(8))
    give(tree, Tier.DEVICE, [6, 7], [7])
    give(tree, Tier.HOST, [5], [])
    match = tree.match(PATH)
    assert (match.device_pages, match.host_pages) == (5, 3)
    assert tree.tails.to_load(PATH, 8) == ([5], [])


def test_a_page_that_is_not_on_the_tier_takes_no_slot() -> None:
    tree = tree_with()
    assert tree.publish_tails(Tier.HOST, PATH, ([7], [7]), ([3], [4])) == ([3], [4])
    give(tree, Tier.DEVICE, [7], [7])
    assert tree.publish_tails(Tier.DEVICE, PATH, ([6, 7], []), ([3, 4], [])) == ([4], []), "page 7 has its slot"


def test_what_leaves_a_tier_takes_its_slots_along() -> None:
    tree = tree_with()
    give(tree, Tier.DEVICE, [5, 6, 7], [7])
    assert tree.retract_device(PATH, 6, 2) == ([6, 7], [6, 7], [7])
    assert [victim.slots for victim in tree.evict(Tier.DEVICE, 2)] == [([4, 5], [5], [])]
    assert tree.tails.counts(Tier.DEVICE) == [0, 0]


def test_of_equal_use_the_shallower_end_goes_first() -> None:
    tree = tree_with(windows=(1,))
    assert tree.publish_tails(Tier.DEVICE, PATH, ([3, 5, 7],), ([3, 5, 7],)) == ([],)
    book = tree.tails.on(Tier.DEVICE)[0]
    assert book.evict(1) == [3]
    tree.touch(PATH[:6], 4)
    assert book.evict(2) == [7, 5], "a touch of a prefix uses its own end and no other"


def test_a_pinned_slot_stays_and_its_pin_is_released_once() -> None:
    tree = tree_with()
    give(tree, Tier.DEVICE, [5, 6, 7], [7])
    pin = tree.tails.pin(Tier.DEVICE, PATH, ([6], [7]))
    assert pin.slots == ([6], [7])
    window, state = tree.tails.on(Tier.DEVICE)
    assert (window.evict(9), state.evict(9)) == ([5, 7], [])
    with pytest.raises(InvariantBroken):
        state.drop(PATH[7])
    tree.tails.unpin(pin)
    assert state.evict(1) == [7]
    with pytest.raises(InvariantBroken):
        tree.tails.unpin(pin)


def test_the_digest_depends_on_which_pages_have_a_slot_in_which_pool_on_which_tier() -> None:
    digests: set[int] = set()
    ends: list[tuple[list[int], list[int]]] = [([5], []), ([], [5]), ([6], [])]
    for tier in Tier:
        for at in ends:
            tree = tree_with()
            publish(tree, Tier.HOST, PATH, range(8))
            before = tree.digest
            tree.publish_tails(tier, PATH, at, at)
            digests.update((before, tree.digest))
            for book, positions in zip(tree.tails.on(tier), at, strict=True):
                assert book.evict(len(positions)) == positions
            assert tree.digest == before
    assert len(digests) == 7


class TailsAgainstModel(RuleBasedStateMachine):
    """One path, two pools, both tiers. The model: slots and use of each page, by tier and pool."""

    @initialize(order=st.sampled_from([LruOrder(), LfuOrder(), PriorityOrder()]))
    def start(self, order: EvictionOrder) -> None:
        self.order = order
        self.tree = RadixTree(order, ("kv",), ("kv",), WINDOWS)
        self.pages: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.ends: dict[tuple[Tier, int], dict[int, list[int]]] = {
            (tier, number): {} for tier in Tier for number in range(len(WINDOWS))
        }
        """[slot, tick, hits, priority, pins] by position."""
        self.pins: list[tuple[TailPin, list[set[int]]]] = []
        self.tick = self.slot = 0

    @rule(tier=tiers, end=st.integers(1, 8), back=st.integers(1, 4), tick=st.integers(0, 3))
    def publish(self, tier: Tier, end: int, back: int, tick: int) -> None:
        self.tick += tick
        publish(self.tree, tier, PATH[:end], range(end), self.tick)
        self.pages[tier].update(range(end))
        at = tuple([list(range(max(0, end - min(back, window)), end)) for window in WINDOWS])
        slots = tuple([[self._new_slot() for _ in positions] for positions in at])
        refused = self.tree.publish_tails(tier, PATH[:end], at, slots, self.tick)
        for number, (positions, offered) in enumerate(zip(at, slots, strict=True)):
            ends = self.ends[tier, number]
            assert refused[number] == [
                slot for position, slot in zip(positions, offered, strict=True) if position in ends
            ]
            for position, slot in zip(positions, offered, strict=True):
                held = ends.setdefault(position, [slot, self.tick, 0, 0, 0])
                held[1] = max(held[1], self.tick)

    @rule(end=st.integers(1, 8), tick=st.integers(0, 3), priority=st.integers(0, 2))
    def touch(self, end: int, tick: int, priority: int) -> None:
        self.tick += tick
        usable = self._usable(end)
        assert self.tree.touch(PATH[:end], self.tick, priority) == usable
        for (_, number), ends in self.ends.items():
            for position in range(max(0, usable - WINDOWS[number]), usable):
                if position in ends:
                    slot, before, hits, important, pins = ends[position]
                    ends[position] = [slot, max(before, self.tick), hits + 1, max(important, priority), pins]

    @rule(tier=tiers, number=st.integers(0, 1), count=st.integers(0, 4))
    def evict_ends(self, tier: Tier, number: int, count: int) -> None:
        ends = self.ends[tier, number]
        free = sorted((position for position in ends if not ends[position][4]), key=lambda at: self._place(ends, at))
        assert self.tree.tails.on(tier)[number].evict(count) == [ends.pop(position)[0] for position in free[:count]]

    @rule(tier=tiers, count=st.integers(0, 4))
    def evict_pages(self, tier: Tier, count: int) -> None:
        if self.pins:
            return
        for victim in self.tree.evict(tier, count):
            gone = range(victim.first, len(victim.path))
            self.pages[tier].difference_update(gone)
            for number in range(len(WINDOWS)):
                ends = self.ends[tier, number]
                assert victim.slots[1 + number] == [ends.pop(position)[0] for position in gone if position in ends]

    @rule(tier=tiers, share=st.integers(0, 255))
    def pin(self, tier: Tier, share: int) -> None:
        at = [{at for at in self.ends[tier, number] if share >> at & 1} for number in range(len(WINDOWS))]
        self.pins.append((self.tree.tails.pin(tier, PATH, [sorted(held) for held in at]), at))
        for number, positions in enumerate(at):
            for position in positions:
                self.ends[tier, number][position][4] += 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, at = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.tails.unpin(pin)
        for number, positions in enumerate(at):
            for position in positions:
                self.ends[pin.tier, number][position][4] -= 1

    @invariant()
    def what_is_usable_and_counted_is_the_models(self) -> None:
        self.tree.check()
        for end in range(len(PATH) + 1):
            assert self.tree.match(PATH[:end]).pages == self._usable(end)
        for (tier, number), ends in self.ends.items():
            book = self.tree.tails.on(tier)[number]
            assert {PATH.index(key): page.slot for key, page in book.pages.items()} == {
                position: held[0] for position, held in ends.items()
            }
            assert book.evictable == sum(not held[4] for held in ends.values())

    def _usable(self, end: int) -> int:
        """The longest prefix of at most `end` pages for which everything is there."""
        cached = 0
        while cached < end and any(cached in pages for pages in self.pages.values()):
            cached += 1
        return max(
            prefix
            for prefix in range(cached + 1)
            if all(
                any(position in self.ends[tier, number] for tier in Tier)
                for number, window in enumerate(WINDOWS)
                for position in range(max(0, prefix - window), prefix)
            )
        )

    def _place(self, ends: dict[int, list[int]], position: int) -> tuple[int, ...]:
        _, tick, hits, priority, _ = ends[position]
        use = {LruOrder: (tick,), LfuOrder: (hits, tick), PriorityOrder: (priority, tick)}[type(self.order)]
        return (*use, position)

    def _new_slot(self) -> int:
        self.slot += 1
        return self.slot


TestTailsAgainstModel = TailsAgainstModel.TestCase
TestTailsAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
