"""Equal logical events give equal answers, whatever the slots are and wherever runs have been split."""

from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.domain import PageKey, Tier
from kvcoord.index.eviction import EvictionOrder, LfuOrder, LruOrder, PriorityOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.tree import RadixTree

Event: TypeAlias = tuple[str, list[PageKey], int]
Answer: TypeAlias = object

events = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "back up", "evict device", "evict host"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=8).map(block_page_keys),
        st.integers(0, 1),
    ),
    max_size=25,
)


class Rank:
    """Plays events on a tree of its own. `piecewise` publishes and touches page by page and pins at random places."""

    def __init__(self, order: EvictionOrder, first_slot: int, piecewise: bool) -> None:
        self.tree = RadixTree(order)
        self.slot = first_slot
        self.piecewise = piecewise

    def play(self, event: Event, tick: int) -> Answer:
        kind, keys, priority = event
        if kind == "evict device":
            return self.evict(Tier.DEVICE, len(keys))
        if kind == "evict host":
            return self.evict(Tier.HOST, len(keys))
        if kind == "request":
            touched = self.tree.touch(keys, tick, priority)
            self.publish(Tier.DEVICE, keys, 0, len(keys), tick, priority)
            return touched
        runs = self.tree.unbacked(keys)
        for first, count in runs:
            self.publish(Tier.HOST, keys, first, count, tick, priority)
        return runs

    def publish(self, tier: Tier, keys: list[PageKey], first: int, count: int, tick: int, priority: int) -> None:
        publish = self.tree.publish_device if tier is Tier.DEVICE else self.tree.publish_host
        pieces = [(position, 1) for position in range(first, first + count)] if self.piecewise else [(first, count)]
        for start, pages in reversed(pieces):
            slots = list(range(self.slot, self.slot + pages))
            self.slot += pages
            publish(keys, start, pages, [slots], tick, priority)
        if self.piecewise:
            middle = first + count // 2
            pins = [self.tree.pin(keys, middle, first + count - middle, tier), self.tree.pin(keys, first, count, tier)]
            for pin in pins:
                self.tree.unpin(pin)

    def evict(self, tier: Tier, count: int) -> Answer:
        if self.piecewise:
            self.tree.select(tier, count)
        return [(victim.path, victim.first) for victim in self.tree.evict(tier, count)]


@given(events, st.sampled_from([LruOrder(), LfuOrder(), PriorityOrder()]))
@settings(max_examples=150, deadline=None)
def test_ranks_with_other_slots_and_other_splits_evict_the_same_pages(
    played: list[Event], order: EvictionOrder
) -> None:
    ranks = [Rank(order, 0, piecewise=False), Rank(order, 10_000, piecewise=True)]
    for number, event in enumerate(played):
        answers = [rank.play(event, number // 2) for rank in ranks]
        assert answers[0] == answers[1]
        assert ranks[0].tree.digest == ranks[1].tree.digest
        for rank in ranks:
            rank.tree.check()
