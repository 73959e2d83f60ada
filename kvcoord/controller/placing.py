"""Host pages that are kept once: near which other they are put, and which ranks copy them.

All of it follows from the index and the slots, which are the same on every rank.
"""

from collections.abc import Sequence

import xxhash

from kvcoord.controller.operations import Operation
from kvcoord.controller.state import CacheState
from kvcoord.domain import PageKey, Tier


def near(state: CacheState, keys: Sequence[PageKey], first: int) -> int:
    """The host slot of the page before page `first` of a path, -1 for none.

    Near it a rank keeps whole paths: with a rank that dies a path goes, instead of a page of each.
    """
    if state.shares is None or not first:
        return -1
    writing = state.in_flight[Tier.HOST].get(keys[first - 1])
    if writing is not None:
        op, position = writing
        return -1 if op.reservation is None else state.pools.slots(Tier.HOST, op.reservation)[0][position]
    resident = state.tree.resident(keys[:first], Tier.HOST)
    if not resident or sum(resident[-1]) != first:
        return -1
    pin = state.tree.pin(keys, first - 1, 1, Tier.HOST)
    (slot,) = pin.slots[0]
    state.tree.unpin(pin)
    return slot


def take_part(state: CacheState, op: Operation) -> None:
    """Only the ranks that keep its pages vote on a write and copy."""
    if state.shares is None or op.reservation is None:
        return
    slots = state.pools.slots(Tier.HOST, op.reservation)
    op.participants = state.shares.keepers([slot for held in slots for slot in held])


def copies_here(state: CacheState, op: Operation) -> bool:
    """Whether this rank copies anything for the operation."""
    return not op.participants or bool(op.participants >> state.rank & 1) or state.shares is None


def pages_copied(state: CacheState, op: Operation) -> int:
    """How many pages of an operation this rank copies."""
    if state.shares is None or not op.participants or op.reservation is None:
        return op.pages
    slots = state.pools.slots(Tier.HOST, op.reservation)[0]
    return sum([state.shares.share_of(slot) == state.shares.own for slot in slots])


def where(state: CacheState, op: Operation) -> str:
    """The slots of a write, for the digest: where they count on every rank, a difference must show. Empty elsewhere."""
    if state.shares is None or op.reservation is None:
        return ""
    return f" at {slots_digest(state.pools.slots(Tier.HOST, op.reservation)[0]):x}"


def slots_digest(slots: Sequence[int]) -> int:
    """A number for these slots in this order."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, slots)).encode())
