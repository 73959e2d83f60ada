"""One node of the radix tree: a run of pages that are used, held and pinned alike.

Keys are chained, so two runs that end in the same key are equal from their first page on. Comparing the last key
decides almost every match; only a mismatch is searched. Knows the shape of a run; knows nothing of totals, of order
of eviction, or of the tree above its parent.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvcoord.domain import PageKey, Tier

Slots: TypeAlias = tuple[list[int], ...]
"""The slots of a run on one tier: one list for each pool of the tier, one slot a page."""

TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Position of a tier in `Node.tiers`. The device is first: it is the tier to read from."""


class EvictionEntry(NamedTuple):
    """The place of a run in the order of eviction: `sort_key`, then the depth and the key of its last page.

    No two entries have the same `number`, so comparing them never reaches the run.
    """

    sort_key: tuple[int, ...]
    minus_depth: int
    key: PageKey
    number: int
    node: "Node"


class Residency:
    """What one tier knows of one run.

    `slots` is None when the run is not on the tier. `resident_below` and `pinned_below` count the children whose
    subtrees hold pages, or pins, on the tier. `entry` is the run's valid place in the order of eviction.
    """

    __slots__ = ("entry", "pinned_below", "pins", "resident_below", "slots")

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.pins = 0
        self.resident_below = 0
        self.pinned_below = 0
        self.entry: EvictionEntry | None = None


class Node:
    """A run of pages. `depth` is the position of its first page in the path; the root has no pages.

    `tick`, `hits` and `priority` are the recency, the number of touches and the importance of every page of the run.
    They are 0 while the run is on no tier.
    """

    __slots__ = ("children", "depth", "hits", "keys", "parent", "priority", "tick", "tiers")

    def __init__(self, parent: "Node | None", depth: int, keys: list[PageKey]) -> None:
        self.parent = parent
        self.depth = depth
        self.keys = keys
        self.children: dict[PageKey, Node] = {}
        self.tiers = (Residency(), Residency())
        self.tick = 0
        self.hits = 0
        self.priority = 0

    @property
    def end(self) -> int:
        """The position in the path after the last page of the run."""
        return self.depth + len(self.keys)

    @property
    def resident(self) -> bool:
        return self.tiers[0].slots is not None or self.tiers[1].slots is not None

    def use(self, tick: int, priority: int) -> None:
        """Recency and importance never go back: a completion may be applied after a later touch."""
        if tick > self.tick:
            self.tick = tick
        if priority > self.priority:
            self.priority = priority

    def forget_use(self) -> None:
        self.tick = self.hits = self.priority = 0

    def shared(self, path: Sequence[PageKey], end: int) -> int:
        """How many pages of the run `path[:end]` goes through. `path[self.depth]` is the first key of the run."""
        keys = self.keys
        depth = self.depth
        high = min(len(keys), end - depth)
        if path[depth + high - 1] == keys[high - 1]:
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) // 2
            if path[depth + middle - 1] == keys[middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def append(self, keys: list[PageKey]) -> "Node":
        """A new child of pages that are on no tier."""
        child = Node(self, self.end, keys)
        self.children[keys[0]] = child
        return child

    def detach(self) -> "Node":
        """Take a run without children out of the tree. Returns its parent."""
        parent = self.parent
        assert parent is not None
        del parent.children[self.keys[0]]
        return parent

    def split(self, count: int) -> "Node":
        """Cut the first `count` pages off into a new parent, which is returned.

        The lower part stays this object: the last page of a run, and with it the run's place in the order of
        eviction, does not change. Both parts are as pinned as the whole was.
        """
        parent = self.parent
        assert parent is not None
        upper = Node(parent, self.depth, self.keys[:count])
        del self.keys[:count]
        upper.tick, upper.hits, upper.priority = self.tick, self.hits, self.priority
        for above, here in zip(upper.tiers, self.tiers, strict=True):
            if here.slots is not None:
                above.slots = tuple([pool[:count] for pool in here.slots])
                for pool in here.slots:
                    del pool[:count]
            above.pins = here.pins
            above.resident_below = 1 if here.slots is not None or here.resident_below else 0
            above.pinned_below = 1 if here.pins or here.pinned_below else 0
        parent.children[upper.keys[0]] = upper
        upper.children[self.keys[0]] = self
        self.parent = upper
        self.depth += count
        return upper

    def fuse(self) -> None:
        """Undo a split that no longer says anything: join an only child that is used, held and pinned alike.

        The child stays, so whoever holds this object must let go of it.
        """
        if len(self.children) != 1:
            return
        (lower,) = self.children.values()
        if not self._like(lower):
            return
        assert self.parent is not None
        self.keys.extend(lower.keys)
        lower.keys = self.keys
        for here, below in zip(self.tiers, lower.tiers, strict=True):
            if here.slots is not None and below.slots is not None:
                for pool, more in zip(here.slots, below.slots, strict=True):
                    pool.extend(more)
                below.slots = here.slots
        lower.depth = self.depth
        lower.parent = self.parent
        self.parent.children[lower.keys[0]] = lower

    def _like(self, other: "Node") -> bool:
        if (self.tick, self.hits, self.priority) != (other.tick, other.hits, other.priority):
            return False
        return all(
            (here.slots is None) == (there.slots is None) and here.pins == there.pins
            for here, there in zip(self.tiers, other.tiers, strict=True)
        )
