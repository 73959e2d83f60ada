"""Which pages of one rank are published, on which tier and in which slots: a radix tree over chained page keys.

Every operation takes `keys`, a path of page keys from the root (each chained to the one before, which is not checked
again), and costs O(pages it names + runs on their path), whatever the number of cached pages. Where runs are split is
never visible: equal pages, uses and pins give equal answers.

Slots are given and returned as one list for each pool of the tier, in the order of the pools named to the
constructor. The tree owns no slot: a slot that leaves it is the caller's to free. `tick` is a logical clock of the
caller, >= 0. Knows nothing of bytes, copies, reservations or other ranks, and is not for use from several threads.

Pools that keep only the end of a sequence have their pages in `tails`. They shorten what is usable, and what leaves a
tier takes its slots in them along: those follow in what is returned, one list for each of these pools.
"""

from collections.abc import Sequence

from kvcoord.domain import PageKey, PoolName, Tier
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.index.check import check_tails, check_tree
from kvcoord.index.eviction import EvictionOrder
from kvcoord.index.node import TIERS, Node, Slots
from kvcoord.index.paths import cover, parents_first, tidy, walk
from kvcoord.index.results import Branch, Match, Pin, Segment
from kvcoord.index.tails import Positions, Tails
from kvcoord.index.tier import DIGEST_MASK, TierIndex, check_key_lengths
from kvcoord.index.victims import Victim


class RadixTree:
    """The index of one rank. `order` says which of the pages that may go goes first. `windows` are those of the pools
    that keep only the end of a sequence, in pages."""

    def __init__(
        self,
        order: EvictionOrder,
        device_pools: Sequence[PoolName] = ("kv",),
        host_pools: Sequence[PoolName] = ("kv",),
        windows: Sequence[int] = (),
    ) -> None:
        if not device_pools or not host_pools:
            raise UsageError("pools", (device_pools, host_pools), "name at least one pool for each tier")
        self._root = Node(None, 0, [])
        self._device = TierIndex(0, device_pools, order)
        self._host = TierIndex(1, host_pools, order)
        self.tails = Tails(windows, order)
        self.hybrid = bool(windows)
        """Whether there are such pools: all that they cost is behind this."""

    @property
    def digest(self) -> int:
        """64 bits over the published (page key, tier) pairs; slots and use do not enter. O(pools)."""
        pages = self._device.digest + self._host.digest
        return (pages + self.tails.digest if self.hybrid else pages) & DIGEST_MASK

    @property
    def run_count(self) -> int:
        """Runs that the tree keeps its pages in, O(runs): the price of a long path, and nothing else, depends on it."""
        return sum(1 for _ in parents_first(self._root)) - 1

    def pages(self, tier: Tier) -> int:
        """Pages published on the tier. O(1)."""
        return self._books(tier).page_count

    def evictable(self, tier: Tier) -> int:
        """Pages that `evict` would take if asked for any number: those with no pin on them or below them. O(1)."""
        books = self._books(tier)
        return books.page_count - books.protected_count

    def outline(self, tier: Tier) -> list[Branch]:
        """All runs and what each holds on the tier, parents first. O(cached pages)."""
        number = self._books(tier).number
        branches: list[Branch] = []
        places: dict[Node, int] = {self._root: -1}
        for node in parents_first(self._root):
            if node.parent is None:
                continue
            places[node] = len(branches)
            held = node.tiers[number].slots
            slots = None if held is None else tuple([list(pool) for pool in held])
            branches.append(Branch(places[node.parent], list(node.keys), slots))
        return branches

    def match(self, keys: Sequence[PageKey]) -> Match:
        """The usable prefix of the path. Changes nothing; a match is no touch."""
        counts = [0, 0]
        runs: list[tuple[int, int, Slots]] = []
        number = -1
        for node, start, shared in walk(self._root, keys, len(keys)):
            here = 0
            held = node.tiers[0].slots
            if held is None:
                here = 1
                held = node.tiers[1].slots
                if held is None:
                    break
            counts[here] += shared
            if here == number:
                for pool, more in zip(runs[-1][2], held, strict=True):
                    pool.extend(more[:shared])
            else:
                number = here
                runs.append((here, start, tuple([pool[:shared] for pool in held])))
        segments = [Segment(TIERS[here], first, len(slots[0]), slots) for here, first, slots in runs]
        if self.hybrid:
            return self._with_ends(keys, Match(counts[0], counts[1], segments))
        return Match(counts[0], counts[1], segments)

    def unbacked(self, keys: Sequence[PageKey], hits_min: int = 0) -> list[tuple[int, int]]:
        """What a write policy would copy: (first, count) of the pages of the path that are on the device, not on the
        host, and have been touched at least `hits_min` times. Not only in the usable prefix.
        """
        ranges: list[tuple[int, int]] = []
        for node, start, shared in walk(self._root, keys, len(keys)):
            if node.tiers[0].slots is not None and node.tiers[1].slots is None and node.hits >= hits_min:
                _append_range(ranges, start, shared)
        return ranges

    def resident(self, keys: Sequence[PageKey], tier: Tier) -> list[tuple[int, int]]:
        """(first, count) of the pages of the path that are on the tier. Not only in the usable prefix."""
        number = self._books(tier).number
        ranges: list[tuple[int, int]] = []
        for node, start, shared in walk(self._root, keys, len(keys)):
            if node.tiers[number].slots is not None:
                _append_range(ranges, start, shared)
        return ranges

    def touch(self, keys: Sequence[PageKey], tick: int, priority: int = 0) -> int:
        """Mark the usable prefix as used at `tick`, one hit more. Returns its pages.

        Recency and priority only grow: the larger of the old and the new value stands.
        """
        if self.hybrid:
            keys = keys[: self.match(keys).pages]
            self.tails.touch(keys, tick, priority)
        touched = 0
        for node, _, shared in walk(self._root, keys, len(keys)):
            if not node.resident:
                break
            run = node if shared == len(node.keys) else node.split(shared)
            run.hits += 1
            run.use(tick, priority)
            self._device.refresh(run)
            self._host.refresh(run)
            touched += shared
        return touched

    def insert(
        self, keys: Sequence[PageKey], first: int, slots: Sequence[Sequence[int]], tick: int, priority: int = 0
    ) -> Slots:
        """Publish the pages from `first` to the end of the path on the device. See `publish_device`."""
        return self.publish_device(keys, first, len(keys) - first, slots, tick, priority)

    def publish_device(
        self,
        keys: Sequence[PageKey],
        first: int,
        count: int,
        slots: Sequence[Sequence[int]],
        tick: int = 0,
        priority: int = 0,
    ) -> Slots:
        """Publish pages `first` to `first + count` of the path on the device, in `slots`.

        A page that is there already keeps its slot; the slots offered for such pages are returned. Nothing is assumed
        about the pages before `first`: they may be on no tier. A page new to the tree starts with `tick` and no hits;
        on any other page `tick` and `priority` act as in `touch`, without a hit. UsageError for a range outside the
        path or slots of another shape; nothing has changed then.
        """
        return self._publish(self._device, keys, first, count, slots, tick, priority)

    def publish_host(
        self,
        keys: Sequence[PageKey],
        first: int,
        count: int,
        slots: Sequence[Sequence[int]],
        tick: int = 0,
        priority: int = 0,
    ) -> Slots:
        """Publish pages on the host. Otherwise as `publish_device`."""
        return self._publish(self._host, keys, first, count, slots, tick, priority)

    def publish_tails(self, tier: Tier, keys: Sequence[PageKey], at: Positions, slots: Slots, tick: int = 0) -> Slots:
        """Gives pages of the path their slots in the pools that keep only ends. `at` has the position of each slot.

        The slots that are not taken are returned: of pages that have one already, or are not on the tier.
        """
        there = {position for first, count in self.resident(keys, tier) for position in range(first, first + count)}
        return tuple(
            [
                [
                    slot
                    for position, slot in zip(positions, offered, strict=True)
                    if position not in there or not book.publish(keys[position], position, slot, tick)
                ]
                for book, positions, offered in zip(self.tails.on(tier), at, slots, strict=True)
            ]
        )

    def retract_device(self, keys: Sequence[PageKey], first: int, count: int) -> Slots:
        """Take pages `first` to `first + count` of the path off the device. Returns their slots, in path order.

        A page left without a tier is forgotten, with its use; below it others may stay. UsageError when one of the
        pages is not there or is pinned there; nothing has changed then.
        """
        return self._retract(self._device, keys, first, count)

    def retract_host(self, keys: Sequence[PageKey], first: int, count: int) -> Slots:
        """Take pages off the host. Otherwise as `retract_device`."""
        return self._retract(self._host, keys, first, count)

    def pin(self, keys: Sequence[PageKey], first: int, count: int, tier: Tier) -> Pin:
        """Keep pages `first` to `first + count` of the path on the tier until `unpin`. Pins of a page add up.

        UsageError when one of the pages is not there.
        """
        books = self._books(tier)
        end = _checked_end(keys, first, count)
        slots = self._held(books, keys, first, end, pinned_allowed=True)
        for node in reversed(cover(self._root, keys, first, end)):
            books.pin(node)
        return Pin(tuple(keys[:end]), first, tier, slots)

    def unpin(self, pin: Pin) -> None:
        """Release a pin, over all parts into which its runs have been split since. InvariantBroken the second time."""
        if not pin.open:
            pages = f"pages {pin.first} to {len(pin.path)} on {pin.tier}"
            raise InvariantBroken("every pin is released once", f"{pages} released again")
        pin.open = False
        books = self._books(pin.tier)
        nodes = cover(self._root, pin.path, pin.first, len(pin.path))
        for node in nodes:
            books.unpin(node)
        tidy(nodes, pin.first)

    def select(self, tier: Tier, count: int) -> list[Victim]:
        """What `evict` would take now. Changes nothing."""
        return self._books(tier).select(count)

    def evict(self, tier: Tier, count: int) -> list[Victim]:
        """Take min(count, evictable) pages off the tier, each time the first in order of those that may go.

        A page may go when it is not pinned and no page below it is on the tier. The order is that of use, then deeper
        pages first, then page keys. Returns the pages in the order in which they went, their slots to be freed.
        """
        books = self._books(tier)
        victims = books.select(count)
        for number, victim in enumerate(victims):
            slots = self._retract(books, victim.path, victim.first, victim.count)
            if self.hybrid:
                victims[number] = Victim(victim.path, victim.first, slots)
        return victims

    def check(self) -> None:
        """Compute every invariant from scratch, O(cached pages). InvariantBroken for the first that does not hold."""
        check_tree(self._root, (self._device, self._host))
        check_tails(self._root, self.tails)

    def _books(self, tier: Tier) -> TierIndex:
        return self._device if tier is Tier.DEVICE else self._host

    def _held(self, books: TierIndex, path: Sequence[PageKey], first: int, end: int, *, pinned_allowed: bool) -> Slots:
        """The slots of pages [first, end). UsageError when one of them is not on the tier, or pinned if not allowed."""
        slots: Slots = tuple([[] for _ in books.pools])
        position = first
        for node, start, shared in walk(self._root, path, end):
            if start + shared <= first:
                continue
            here = node.tiers[books.number]
            if here.slots is None:
                break
            if here.pins and not pinned_allowed:
                raise UsageError("first", max(start, first), f"pinned on {TIERS[books.number]}: unpin it first")
            for pool, more in zip(slots, here.slots, strict=True):
                pool.extend(more[max(first - start, 0) : shared])
            position = start + shared
        if position < end:
            raise UsageError("first", position, f"not on {TIERS[books.number]}: name only pages that are")
        return slots

    def _publish(
        self,
        books: TierIndex,
        keys: Sequence[PageKey],
        first: int,
        count: int,
        slots: Sequence[Sequence[int]],
        tick: int,
        priority: int,
    ) -> Slots:
        end = _checked_end(keys, first, count)
        _check_slots(slots, len(books.pools), count)
        check_key_lengths(keys[first:end])
        kept: Slots = tuple([[] for _ in books.pools])
        nodes = cover(self._root, keys, first, end)
        for node in reversed(nodes):
            offered = tuple([list(pool[node.depth - first : node.end - first]) for pool in slots])
            node.use(tick, priority)
            if node.tiers[books.number].slots is None:
                books.publish(node, offered)
            else:
                for pool, more in zip(kept, offered, strict=True):
                    pool[:0] = more
            self._device.refresh(node)
            self._host.refresh(node)
        tidy(nodes, first)
        return kept

    def _retract(self, books: TierIndex, keys: Sequence[PageKey], first: int, count: int) -> Slots:
        end = _checked_end(keys, first, count)
        slots = self._held(books, keys, first, end, pinned_allowed=False)
        nodes = cover(self._root, keys, first, end)
        for node in nodes:
            books.retract(node)
            if not node.resident:
                node.forget_use()
        tidy(nodes, first)
        return slots + self.tails.drop(TIERS[books.number], keys[first:end]) if self.hybrid else slots

    def _with_ends(self, keys: Sequence[PageKey], match: Match) -> Match:
        """The part of a match that is usable with what the pools of ends have. From the first page on of whose end
        anything has to be loaded pages count as host; a segment says where the page itself is."""
        end = self.tails.usable(keys, match.pages)
        late = min([positions[0] for positions in self.tails.to_load(keys, end) if positions], default=end)
        device = 0
        segments: list[Segment] = []
        for segment in match.segments:
            count = min(segment.count, end - segment.first)
            if count <= 0:
                break
            segments.append(
                Segment(segment.tier, segment.first, count, tuple([pool[:count] for pool in segment.slots]))
            )
            if segment.tier is Tier.DEVICE:
                device += max(0, min(segment.first + count, late) - segment.first)
        return Match(device, end - device, segments)


def _checked_end(keys: Sequence[PageKey], first: int, count: int) -> int:
    if first < 0 or count < 0 or first + count > len(keys):
        raise UsageError("first, count", (first, count), f"stay within the {len(keys)} pages of the path")
    return first + count


def _check_slots(slots: Sequence[Sequence[int]], pool_count: int, page_count: int) -> None:
    if len(slots) != pool_count or any(len(pool) != page_count for pool in slots):
        lengths = [len(pool) for pool in slots]
        raise UsageError("slots", lengths, f"give {pool_count} pools a slot for each of the {page_count} pages")


def _append_range(ranges: list[tuple[int, int]], first: int, count: int) -> None:
    if ranges and sum(ranges[-1]) == first:
        first, before = ranges.pop()
        count += before
    ranges.append((first, count))
