"""Every invariant of the tree, computed again from scratch: for tests and for the simulation.

Costs O(cached pages). Trusts nothing but the runs' keys, slots, pins and children.
"""

from typing import NoReturn

from kvcoord.domain import PAGE_KEY_BYTES, PageKey
from kvcoord.errors import InvariantBroken
from kvcoord.index.node import TIERS, Node
from kvcoord.index.paths import parents_first
from kvcoord.index.tails import Tails
from kvcoord.index.tier import TierIndex, key_sum


def check_tree(root: Node, books: tuple[TierIndex, TierIndex]) -> None:
    """Raises InvariantBroken for the first invariant that does not hold."""
    nodes = list(parents_first(root))
    _check_shape(root, nodes)
    for tier in books:
        _check_slots(tier, nodes)
        _check_counts(tier, nodes)
        _check_queue(tier, nodes)


def check_tails(root: Node, tails: Tails) -> None:
    """Raises InvariantBroken when a page has a slot in a pool of ends without being there, or its book is wrong."""
    if not tails.windows:
        return
    for number, tier in enumerate(TIERS):
        depths = {
            key: node.depth + at
            for node in parents_first(root)
            if node.tiers[number].slots is not None
            for at, key in enumerate(node.keys)
        }
        for book in tails.on(tier):
            book.check()
            for key, page in book.pages.items():
                if depths.get(key) != page.depth:
                    where = f"{key.hex()} on {tier}, position {page.depth}, not {depths.get(key)}"
                    raise InvariantBroken("only a page that is on the tier has a slot there", where)


def _check_shape(root: Node, nodes: list[Node]) -> None:
    if root.keys or root.resident or root.parent is not None:
        _broken("the root holds no pages", root)
    seen: set[PageKey] = set()
    for node in nodes:
        for first_key, child in node.children.items():
            if child.parent is not node or child.depth != node.end or not child.keys or child.keys[0] != first_key:
                _broken("a child begins where its parent ends, under its own first key", child)
        if any(len(key) != PAGE_KEY_BYTES for key in node.keys if node.resident):
            _broken("published keys are page keys", node)
        if not seen.isdisjoint(node.keys) or len(set(node.keys)) != len(node.keys):
            _broken("a page is in one place", node)
        seen.update(node.keys)
        if node is not root and not node.resident:
            if not node.children:
                _broken("a run without a tier has children", node)
            if node.tick or node.hits or node.priority:
                _broken("a page without a tier has no use", node)


def _check_slots(tier: TierIndex, nodes: list[Node]) -> None:
    seen: list[set[int]] = [set() for _ in tier.pools]
    for node in nodes:
        slots = node.tiers[tier.number].slots
        if slots is None:
            if node.tiers[tier.number].pins:
                _broken("a pinned page is on its tier", node)
            continue
        if len(slots) != len(tier.pools):
            _broken("a page has one slot in each pool of its tier", node)
        for used, pool in zip(seen, slots, strict=True):
            if len(pool) != len(node.keys):
                _broken("a page has one slot in each pool of its tier", node)
            if not used.isdisjoint(pool) or len(set(pool)) != len(pool):
                _broken("a slot holds one page", node)
            used.update(pool)


def _check_counts(tier: TierIndex, nodes: list[Node]) -> None:
    pages = protected = keys = 0
    resident: set[Node] = set()
    pinned: set[Node] = set()
    for node in reversed(nodes):
        here = node.tiers[tier.number]
        children = node.children.values()
        if here.resident_below != sum(child in resident for child in children):
            _broken("subtrees on the tier are counted", node)
        if here.pinned_below != sum(child in pinned for child in children):
            _broken("subtrees with pins are counted", node)
        if here.pins < 0:
            _broken("pins are never negative", node)
        if here.slots is not None or here.resident_below:
            resident.add(node)
        if here.pins or here.pinned_below:
            pinned.add(node)
        if here.slots is not None:
            pages += len(node.keys)
            protected += len(node.keys) if node in pinned else 0
            keys += key_sum(node.keys)
    found = (tier.page_count, tier.protected_count, tier.key_sum)
    if found != (pages, protected, keys % 2**64):
        raise InvariantBroken(
            "totals of a tier", f"tier {tier.number}: {found}, not {(pages, protected, keys % 2**64)}"
        )


def _check_queue(tier: TierIndex, nodes: list[Node]) -> None:
    placed = 0
    for node in nodes:
        here = node.tiers[tier.number]
        may_go = here.slots is not None and not here.resident_below and not here.pins
        if may_go != (here.entry is not None):
            _broken("the leaves of a tier that are not pinned are in its queue, no others", node)
        if here.entry is not None:
            placed += 1
            if (
                here.entry[:3] != (tier.queue.sort_key(node), 1 - node.end, node.keys[-1])
                or here.entry.node is not node
            ):
                _broken("a run stands in the queue where its use and last page say", node)
    if tier.queue.valid_count != placed or not tier.queue.is_bounded():
        raise InvariantBroken("the queue holds each valid entry and few void ones", f"tier {tier.number}")


def _broken(invariant: str, node: Node) -> NoReturn:
    first_key = node.keys[0].hex() if node.keys else "no key"
    raise InvariantBroken(invariant, f"run of {len(node.keys)} pages at depth {node.depth}, {first_key}")
