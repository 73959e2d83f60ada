"""The books of one tier: how many pages it holds, which are pinned or protected, which may be evicted, and its digest.

Works on whole runs; who splits them so that an operation fits is the tree's business. Every change costs O(pages of
the run) plus the ancestors up to the nearest one that is already counted, whatever the number of cached pages.
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvcoord.domain import PAGE_KEY_BYTES, PageKey
from kvcoord.errors import UsageError
from kvcoord.index.eviction import EvictionOrder, EvictionQueue
from kvcoord.index.node import Node, Slots
from kvcoord.index.victims import Victim, select_victims

DIGEST_MASK: Final = 2**64 - 1
_DIGEST_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd, one for each tier: a page that changes its tier changes the digest."""


def key_sum(keys: Sequence[PageKey]) -> int:
    """The sum of the first words of the keys, which are words of a cryptographic hash."""
    return sum(struct.unpack(f"<{2 * len(keys)}Q", b"".join(keys))[::2])


def check_key_lengths(keys: Sequence[PageKey]) -> None:
    """UsageError for what cannot be page keys, before anything has changed."""
    size_bytes = len(b"".join(keys))
    if size_bytes != PAGE_KEY_BYTES * len(keys):
        raise UsageError("keys", f"{size_bytes} bytes in {len(keys)} keys", f"a page key has {PAGE_KEY_BYTES} bytes")


class TierIndex:
    """The pages of one tier. `number` is its position in `Node.tiers`.

    `page_count` pages are on the tier; `protected_count` of them are pinned or above a pinned page. `key_sum` adds
    the first words of their keys up, modulo 2**64.
    """

    def __init__(self, number: int, pools: Sequence[str], order: EvictionOrder) -> None:
        self.number = number
        self.pools = tuple(pools)
        self.page_count = 0
        self.protected_count = 0
        self.key_sum = 0
        self.queue = EvictionQueue(number, order)

    @property
    def digest(self) -> int:
        """A number of 64 bits that depends on the set of pages alone."""
        return self.key_sum * _DIGEST_FACTORS[self.number] & DIGEST_MASK

    def publish(self, node: Node, slots: Slots) -> None:
        here = node.tiers[self.number]
        here.slots = slots
        self._count(node, 1)
        if not here.resident_below:
            self._occupy_above(node)
        self.refresh(node)

    def retract(self, node: Node) -> Slots:
        here = node.tiers[self.number]
        slots = here.slots
        assert slots is not None
        here.slots = None
        self._count(node, -1)
        if not here.resident_below:
            self._vacate_above(node)
        self.refresh(node)
        return slots

    def pin(self, node: Node) -> None:
        here = node.tiers[self.number]
        here.pins += 1
        if here.pins == 1:
            if not here.pinned_below:
                self.protected_count += len(node.keys)
                self._protect_above(node)
            self.refresh(node)

    def unpin(self, node: Node) -> None:
        here = node.tiers[self.number]
        here.pins -= 1
        if here.pins == 0:
            if not here.pinned_below:
                self.protected_count -= len(node.keys)
                self._unprotect_above(node)
            self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Give the run its place in the order of eviction, or none, after anything about it changed."""
        here = node.tiers[self.number]
        if here.slots is None or here.resident_below or here.pins:
            self.queue.remove(node)
        else:
            self.queue.place(node)

    def select(self, count: int) -> list[Victim]:
        return select_victims(self.queue, self.number, count)

    def _count(self, node: Node, sign: int) -> None:
        self.page_count += sign * len(node.keys)
        self.key_sum = (self.key_sum + sign * key_sum(node.keys)) & DIGEST_MASK
        if node.tiers[self.number].pinned_below:
            self.protected_count += sign * len(node.keys)

    def _occupy_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            there = above.tiers[self.number]
            there.resident_below += 1
            if there.slots is not None:
                if there.resident_below == 1:
                    self.refresh(above)
                return
            if there.resident_below > 1:
                return
            above = above.parent

    def _vacate_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            there = above.tiers[self.number]
            there.resident_below -= 1
            if there.resident_below:
                return
            if there.slots is not None:
                self.refresh(above)
                return
            above = above.parent

    def _protect_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            there = above.tiers[self.number]
            there.pinned_below += 1
            if there.pins or there.pinned_below > 1:
                return
            if there.slots is not None:
                self.protected_count += len(above.keys)
            above = above.parent

    def _unprotect_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            there = above.tiers[self.number]
            there.pinned_below -= 1
            if there.pins or there.pinned_below:
                return
            if there.slots is not None:
                self.protected_count -= len(above.keys)
            above = above.parent
