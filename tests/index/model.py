"""A naive index: one record a page, every answer by searching all of them. What the tree must agree with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcoord.domain import PageKey, Tier
from kvcoord.index.eviction import EvictionOrder

Path = tuple[PageKey, ...]


@dataclass
class Page:
    path: Path
    slots: dict[Tier, tuple[int, ...]] = field(default_factory=dict)
    pins: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 0, Tier.HOST: 0})
    tick: int = 0
    hits: int = 0
    priority: int = 0

    @property
    def key(self) -> PageKey:
        return self.path[-1]


class NaiveIndex:
    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.cached: dict[PageKey, Page] = {}

    def on(self, tier: Tier) -> list[Page]:
        return [page for page in self.cached.values() if tier in page.slots]

    def matched(self, path: Sequence[PageKey]) -> list[Page]:
        pages = []
        for key in path:
            if key not in self.cached:
                break
            pages.append(self.cached[key])
        return pages

    def touch(self, path: Sequence[PageKey], tick: int, priority: int) -> None:
        for page in self.matched(path):
            page.hits += 1
            self._use(page, tick, priority)

    def publish(
        self,
        tier: Tier,
        path: Sequence[PageKey],
        first: int,
        slots: Sequence[tuple[int, ...]],
        tick: int,
        priority: int,
    ) -> list[tuple[int, ...]]:
        refused = []
        for position, slot in enumerate(slots, first):
            page = self.cached.setdefault(path[position], Page(tuple(path[: position + 1])))
            self._use(page, tick, priority)
            if page.slots.setdefault(tier, slot) != slot:
                refused.append(slot)
        return refused

    def are_on(self, tier: Tier, keys: Sequence[PageKey]) -> bool:
        return all(key in self.cached and tier in self.cached[key].slots for key in keys)

    def retract(self, tier: Tier, keys: Sequence[PageKey]) -> list[tuple[int, ...]]:
        slots = []
        for key in keys:
            page = self.cached[key]
            slots.append(page.slots.pop(tier))
            if not page.slots:
                del self.cached[key]
        return slots

    def evict(self, tier: Tier, count: int) -> list[Page]:
        gone = []
        for _ in range(count):
            leaves = [page for page in self.on(tier) if not page.pins[tier] and not self._below(page, tier)]
            if not leaves:
                break
            page = min(leaves, key=lambda page: (self.order.sort_key(page), -len(page.path), page.key))
            gone.append(Page(page.path, dict(page.slots)))
            self.retract(tier, [page.key])
        return gone

    def evictable(self, tier: Tier) -> int:
        return sum(
            not page.pins[tier] and not any(below.pins[tier] for below in self._below(page, tier))
            for page in self.on(tier)
        )

    def _below(self, page: Page, tier: Tier) -> list[Page]:
        depth = len(page.path)
        return [other for other in self.on(tier) if len(other.path) > depth and other.path[depth - 1] == page.key]

    def _use(self, page: Page, tick: int, priority: int) -> None:
        page.tick = max(page.tick, tick)
        page.priority = max(page.priority, priority)
