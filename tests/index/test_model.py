"""The tree against the naive index, over random operations on small prefix trees."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcoord.domain import PageKey, Tier
from kvcoord.errors import UsageError
from kvcoord.index.eviction import EvictionOrder, LfuOrder, LruOrder, PriorityOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.node import Slots
from kvcoord.index.results import Pin
from kvcoord.index.tree import RadixTree
from kvcoord.index.victims import Victim
from tests.index.model import NaiveIndex, Page

POOLS = {Tier.DEVICE: ("kv",), Tier.HOST: ("kv", "index")}

paths = st.lists(st.sampled_from([0, 0, 1]), max_size=6).map(lambda ids: tuple(block_page_keys(ids)))
tiers = st.sampled_from(list(Tier))
steps = st.integers(-2, 2)
fractions = st.floats(0, 1)


def by_pool(pages: Sequence[tuple[int, ...]], tier: Tier) -> Slots:
    return tuple([page[number] for page in pages] for number in range(len(POOLS[tier])))


def runs_of(pages: list[Page], tier: Tier) -> list[Victim]:
    """Pages in the order in which they went, each with the following page when that is its parent."""
    victims: list[Victim] = []
    group: list[Page] = []
    for page, after in itertools.zip_longest(pages, pages[1:]):
        group.insert(0, page)
        if after is None or after.path != page.path[:-1]:
            slots = by_pool([one.slots[tier] for one in group], tier)
            victims.append(Victim(list(group[-1].path), len(group[0].path) - 1, slots))
            group = []
    return victims


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize(order=st.sampled_from([LruOrder(), LfuOrder(), PriorityOrder()]))
    def start(self, order: EvictionOrder) -> None:
        self.tree = RadixTree(order, POOLS[Tier.DEVICE], POOLS[Tier.HOST])
        self.model = NaiveIndex(order)
        self.tick = 2
        self.slot = 0
        self.pins: list[Pin] = []

    def advance(self, step: int) -> int:
        """Mostly forward or the same again, sometimes late."""
        self.tick += max(step, 0)
        return max(self.tick + min(step, 0), 0)

    @rule(path=paths, step=steps, priority=st.integers(0, 2))
    def touch(self, path: tuple[PageKey, ...], step: int, priority: int) -> None:
        tick = self.advance(step)
        assert self.tree.touch(path, tick, priority) == len(self.model.matched(path))
        self.model.touch(path, tick, priority)

    @rule(path=paths, cut=st.tuples(fractions, fractions), tier=tiers, step=steps, priority=st.integers(0, 2))
    def publish(
        self, path: tuple[PageKey, ...], cut: tuple[float, float], tier: Tier, step: int, priority: int
    ) -> None:
        first, end = sorted(round(part * len(path)) for part in cut)
        tick = self.advance(step)
        slots = [
            tuple(range(start, start + len(POOLS[tier])))
            for start in range(self.slot, self.slot + 2 * (end - first), 2)
        ]
        self.slot += 2 * (end - first)
        publish = self.tree.publish_device if tier is Tier.DEVICE else self.tree.publish_host
        refused = publish(path, first, end - first, by_pool(slots, tier), tick, priority)
        assert refused == by_pool(self.model.publish(tier, path, first, slots, tick, priority), tier)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data(), cut=st.tuples(fractions, fractions), tier=tiers)
    def retract(self, data: st.DataObject, cut: tuple[float, float], tier: Tier) -> None:
        path = data.draw(self.cached_paths())
        first, end = sorted(round(part * len(path)) for part in cut)
        retract = self.tree.retract_device if tier is Tier.DEVICE else self.tree.retract_host
        keys = path[first:end]
        if self.model.are_on(tier, keys) and not any(self.model.cached[key].pins[tier] for key in keys):
            slots = retract(path, first, end - first)
            assert slots == by_pool(self.model.retract(tier, keys), tier)
        else:
            with pytest.raises(UsageError):
                retract(path, first, end - first)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data(), cut=st.tuples(fractions, fractions), tier=tiers)
    def pin(self, data: st.DataObject, cut: tuple[float, float], tier: Tier) -> None:
        path = data.draw(self.cached_paths())
        first, end = sorted(round(part * len(path)) for part in cut)
        if not self.model.are_on(tier, path[first:end]):
            with pytest.raises(UsageError):
                self.tree.pin(path, first, end - first, tier)
            return
        pin = self.tree.pin(path, first, end - first, tier)
        self.pins.append(pin)
        pages = [self.model.cached[key] for key in path[first:end]]
        assert pin.slots == by_pool([page.slots[tier] for page in pages], tier)
        for page in pages:
            page.pins[tier] += 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(pin)
        for key in pin.path[pin.first :]:
            self.model.cached[key].pins[pin.tier] -= 1

    @rule(tier=tiers, count=st.integers(0, 12))
    def evict(self, tier: Tier, count: int) -> None:
        selected = self.tree.select(tier, count)
        evicted = self.tree.evict(tier, count)
        assert evicted == selected == runs_of(self.model.evict(tier, count), tier)

    @rule(path=paths, hits_min=st.integers(0, 2))
    def match(self, path: tuple[PageKey, ...], hits_min: int) -> None:
        match = self.tree.match(path)
        pages = self.model.matched(path)
        read_from = [Tier.DEVICE if Tier.DEVICE in page.slots else Tier.HOST for page in pages]
        assert (match.device_pages, match.host_pages) == (read_from.count(Tier.DEVICE), read_from.count(Tier.HOST))
        position = 0
        for segment, (tier, group) in zip(match.segments, itertools.groupby(read_from), strict=True):
            count = len(list(group))
            slots = by_pool([page.slots[tier] for page in pages[position : position + count]], tier)
            assert (segment.tier, segment.first, segment.count, segment.slots) == (tier, position, count, slots)
            position += count
        unbacked = [
            position
            for position, page in enumerate(map(self.model.cached.get, path))
            if page is not None and set(page.slots) == {Tier.DEVICE} and page.hits >= hits_min
        ]
        assert [
            at for first, count in self.tree.unbacked(path, hits_min) for at in range(first, first + count)
        ] == unbacked

    @invariant()
    def the_tree_is_sound_and_its_totals_are_the_models(self) -> None:
        self.tree.check()
        for tier in Tier:
            assert self.tree.pages(tier) == len(self.model.on(tier))
            assert self.tree.evictable(tier) == self.model.evictable(tier)
        rebuilt = RadixTree(LruOrder())
        for page in sorted(self.model.cached.values(), key=lambda page: page.key):
            for tier in page.slots:
                publish = rebuilt.publish_device if tier is Tier.DEVICE else rebuilt.publish_host
                publish(page.path, len(page.path) - 1, 1, [[0]])
        assert self.tree.digest == rebuilt.digest

    def cached_paths(self) -> st.SearchStrategy[tuple[PageKey, ...]]:
        return st.sampled_from(sorted(page.path for page in self.model.cached.values()))


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
