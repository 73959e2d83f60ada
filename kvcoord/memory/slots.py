"""Who owns which slot of one pool, and in which state the slot is.

A slot goes round one circle; only the owner moves it, and always a whole set of slots at a time:

    FREE -reserve-> RESERVED -commit-> USED -free-> FREE
    FREE -claim-> USED                              slots of an earlier life, by number
    RESERVED -free-> FREE
    RESERVED | USED -quarantine-> QUARANTINED -release-> FREE

Every call checks all of its slots before it changes the first one: after an error the pool is as it was. At any time
free + reserved + used + quarantined = capacity.

It does not know: the bytes behind a slot, what an operation is, whether a copy runs. It belongs to one thread and does
nothing by itself.

A pool may consist of *shares* of equal size, of which one is preferred when slots are reserved; which slots come out
depends on nothing but the calls so far.

Speed: a set of slots that is one ascending run is checked and changed as a slice in C, any other set slot by slot.
The free slots are a stack kept with the next slot to hand out on top, so that a fresh pool hands out 0, 1, 2, ... and
a set that comes back is handed out again in its old order.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from kvcoord.domain import PoolName
from kvcoord.errors import (
    InvariantBroken,
    PoolError,
    SlotFreedTwice,
    SlotNotAllocated,
    SlotOwnerMismatch,
    SlotStateMismatch,
    UsageError,
)


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1
    """Held for an operation whose outcome is not known yet."""
    USED = 2
    QUARANTINED = 3
    """Given up by its owner while a copy still touches it."""


_FREE: Final = int(SlotState.FREE)
_RESERVED: Final = int(SlotState.RESERVED)
_USED: Final = int(SlotState.USED)
_QUARANTINED: Final = int(SlotState.QUARANTINED)

_FROM_RESERVED: Final = bytes((_RESERVED,))
_FROM_USED: Final = bytes((_USED,))
_FROM_HELD: Final = bytes((_RESERVED, _USED))
_FROM_QUARANTINED: Final = bytes((_QUARANTINED,))


class SlotStatistics(msgspec.Struct, frozen=True):
    """Slots of one pool by state, at one moment. They add up to `capacity`."""

    pool: PoolName
    capacity: int
    free: int
    reserved: int
    used: int
    quarantined: int


class SlotPool:
    """The slots 0 .. capacity - 1 of one tier on one rank. An owner is any string: an operation, a lease, the index.

    Sets of slots come out as lists; any sequence without repeats is taken back, lists fastest, in any order and in
    other portions than they were handed out. All calls that take slots raise, for the first slot that breaks a rule:
    `SlotNotAllocated` (outside the pool, or never handed out), `SlotFreedTwice` (free again, or named twice in this
    call), `SlotOwnerMismatch` (held by another owner) or `SlotStateMismatch` (held, but not in a state to start from).
    """

    __slots__ = (
        "_ascending",
        "_counts",
        "_free",
        "_owners",
        "_states",
        "capacity",
        "name",
        "share_count",
        "share_slots",
    )

    def __init__(self, name: PoolName, capacity: int, share_count: int = 1) -> None:
        if capacity < 0:
            raise UsageError(f"capacity of pool {name}", capacity, "give a number of slots >= 0")
        if share_count < 1 or capacity % share_count:
            raise UsageError(f"shares of pool {name}", share_count, f"must divide its {capacity} slots evenly")
        self.name: Final = name
        self.capacity: Final = capacity
        self.share_count: Final = share_count
        self.share_slots: Final = capacity // share_count
        self._ascending: Final = list(range(capacity))
        self._free = [
            self._ascending[first : first + self.share_slots][::-1]
            for first in range(0, capacity, self.share_slots or 1)
        ] or [[]]
        """One stack for each share."""
        self._states = bytearray(capacity)
        self._owners: list[str | None] = [None] * capacity
        """The owner, of a free slot the last one; None until the slot is handed out for the first time."""
        self._counts = [capacity, 0, 0, 0]
        """Slots by state."""

    @property
    def free_count(self) -> int:
        return self._counts[_FREE]

    @property
    def reserved_count(self) -> int:
        return self._counts[_RESERVED]

    @property
    def used_count(self) -> int:
        return self._counts[_USED]

    @property
    def quarantined_count(self) -> int:
        return self._counts[_QUARANTINED]

    def statistics(self) -> SlotStatistics:
        return SlotStatistics(self.name, self.capacity, *self._counts)

    def state(self, slot: int) -> SlotState:
        """The state of one slot. Raises `SlotNotAllocated` for a slot outside the pool."""
        self._require_inside(slot)
        return SlotState(self._states[slot])

    def owner(self, slot: int) -> str | None:
        """Who holds one slot, None when it is free. Raises `SlotNotAllocated` for a slot outside the pool."""
        self._require_inside(slot)
        return self._owners[slot] if self._states[slot] else None

    def used_by_share(self) -> list[int]:
        """USED slots of each share. O(capacity)."""
        size = self.share_slots
        return [self._states.count(_USED, share * size, (share + 1) * size) for share in range(self.share_count)]

    def reserve(self, count: int, owner: str, near: int = -1) -> list[int] | None:
        """Take `count` free slots, or none at all and answer None when fewer are free.

        Adjacent slots come out next to each other in ascending order as far as the free ones allow it. They come from
        the share of the slot `near` if that has at least half as many free ones as the emptiest, else from that one;
        what is missing then comes from the emptiest.
        Raises `UsageError` for a negative count.
        """
        if count <= 0:
            if count < 0:
                raise UsageError(f"slots to reserve in pool {self.name}", count, "give a number >= 0")
            return []
        if count > self._counts[_FREE]:
            return None
        slots = _pop(self._free[0], count) if self.share_count == 1 else self._from_shares(count, near)
        self._assign(slots, self._run(slots), _RESERVED, owner)
        self._counts[_FREE] -= count
        self._counts[_RESERVED] += count
        return slots

    def claim(self, slots: Sequence[int], owner: str) -> None:
        """FREE -> USED for these very slots: what they hold is still there from an earlier life. O(free slots).

        Raises SlotNotAllocated outside the pool and SlotStateMismatch for a slot that is not free or is named twice.
        """
        claimed: set[int] = set()
        for slot in slots:
            self._require_inside(slot)
            if self._states[slot] != _FREE or slot in claimed:
                raise SlotStateMismatch(self.name, slot, owner, SlotState(self._states[slot]).name.lower())
            claimed.add(slot)
        for slot in slots:
            self._states[slot] = _USED
            self._owners[slot] = owner
        self._free = [[slot for slot in free if slot not in claimed] for free in self._free]
        self._counts[_FREE] -= len(claimed)
        self._counts[_USED] += len(claimed)

    def commit(self, slots: Sequence[int], owner: str) -> None:
        """RESERVED -> USED. Raises as the class says."""
        self._change(slots, owner, _FROM_RESERVED, _USED, owner)

    def free(self, slots: Sequence[int], owner: str) -> None:
        """RESERVED or USED -> FREE. No copy may touch these slots any more. Raises as the class says."""
        self._change(slots, owner, _FROM_HELD, _FREE, owner)
        self._give_back(slots)

    def quarantine(self, slots: Sequence[int], owner: str) -> None:
        """RESERVED or USED -> QUARANTINED: given up, but a copy still touches them. Raises as the class says."""
        self._change(slots, owner, _FROM_HELD, _QUARANTINED, owner)

    def release(self, slots: Sequence[int], owner: str) -> None:
        """QUARANTINED -> FREE: the copy that touched them is over. Raises as the class says."""
        self._change(slots, owner, _FROM_QUARANTINED, _FREE, owner)
        self._give_back(slots)

    def hand_over(self, slots: Sequence[int], owner: str, new_owner: str) -> None:
        """Give USED slots to another owner; they stay USED. Raises as the class says."""
        self._change(slots, owner, _FROM_USED, _USED, new_owner)

    def check(self) -> None:
        """Count everything again, slot by slot. Raises `InvariantBroken` when the books do not agree. O(capacity)."""
        counted = [self._states.count(state) for state in SlotState]
        if counted != self._counts or sum(counted) != self.capacity or len(self._states) != self.capacity:
            raise self._broken(f"{self._counts} slots by state in the books, {counted} counted of {self.capacity}")
        if any(slot // self.share_slots != share for share, free in enumerate(self._free) for slot in free):
            raise self._broken("a slot to hand out next is in another share than its own")
        if sorted([slot for free in self._free for slot in free]) != [
            slot for slot, state in enumerate(self._states) if state == _FREE
        ]:
            raise self._broken("the slots to hand out next are not exactly the free ones, once each")
        if len(self._owners) != self.capacity:
            raise self._broken(f"{len(self._owners)} owners of {self.capacity} slots")
        for slot, (state, owner) in enumerate(zip(self._states, self._owners, strict=True)):
            if state != _FREE and owner is None:
                raise self._broken(f"slot {slot} is {SlotState(state).name.lower()} and has no owner")

    def _from_shares(self, count: int, near: int) -> list[int]:
        free = self._free
        share = near // self.share_slots if near >= 0 else 0
        if near < 0 or 2 * len(free[share]) < max(map(len, free)):
            share = self._emptiest()
        slots: list[int] = []
        while len(slots) < count:
            slots += _pop(free[share], min(count - len(slots), len(free[share])))
            share = self._emptiest()
        return slots

    def _emptiest(self) -> int:
        """The share with the most free slots, the first of several."""
        counts = [len(free) for free in self._free]
        return counts.index(max(counts))

    def _give_back(self, slots: Sequence[int]) -> None:
        if self.share_count == 1:
            self._free[0] += slots[::-1]
            return
        for slot in reversed(slots):
            self._free[slot // self.share_slots].append(slot)

    def _change(self, slots: Sequence[int], owner: str, from_states: bytes, to_state: int, new_owner: str) -> None:
        """Check all slots, then move all of them to `to_state`. `from_states` holds the states allowed before."""
        if not slots:
            return
        held = slots if type(slots) is list else list(slots)
        run = self._run(held)
        if run is not None:
            states = self._states[run]
            if states.translate(None, from_states) or self._owners[run].count(owner) != len(held):
                raise next(self._errors(held, owner, from_states))
        else:
            self._check_scattered(held, owner, from_states)
            states = bytearray([self._states[slot] for slot in held])
        for state in from_states:
            self._counts[state] -= states.count(state)
        self._counts[to_state] += len(held)
        self._assign(held, run, to_state, new_owner)

    def _check_scattered(self, slots: list[int], owner: str, from_states: bytes) -> None:
        states, owners, capacity = self._states, self._owners, self.capacity
        for slot in slots:
            if not 0 <= slot < capacity or states[slot] not in from_states or owners[slot] != owner:
                raise next(self._errors(slots, owner, from_states))
        if len(set(slots)) != len(slots):
            raise next(self._errors(slots, owner, from_states))

    def _run(self, slots: list[int]) -> slice | None:
        """Where `slots` (not empty) lies in the pool, if it is one ascending run inside of it."""
        run = slice(slots[0], slots[0] + len(slots))
        return run if self._ascending[run] == slots else None

    def _assign(self, slots: list[int], run: slice | None, state: int, owner: str) -> None:
        states, owners = self._states, self._owners
        if run is not None:
            states[run] = bytes((state,)) * len(slots)
            owners[run] = [owner] * len(slots)
        else:
            for slot in slots:
                states[slot] = state
                owners[slot] = owner

    def _errors(self, slots: list[int], owner: str, from_states: bytes) -> Iterator[PoolError]:
        """One error for each slot that breaks a rule, in the order of `slots`."""
        seen: set[int] = set()
        for slot in slots:
            inside = 0 <= slot < self.capacity
            found = self._owners[slot] if inside else None
            if found is None:
                yield SlotNotAllocated(self.name, slot, owner, None)
            elif slot in seen or self._states[slot] == _FREE:
                yield SlotFreedTwice(self.name, slot, owner, found)
            elif found != owner:
                yield SlotOwnerMismatch(self.name, slot, owner, found)
            elif self._states[slot] not in from_states:
                yield SlotStateMismatch(self.name, slot, owner, SlotState(self._states[slot]).name.lower())
            seen.add(slot)

    def _require_inside(self, slot: int) -> None:
        if not 0 <= slot < self.capacity:
            raise SlotNotAllocated(self.name, slot, None, None)

    def _broken(self, detail: str) -> InvariantBroken:
        return InvariantBroken("conservation", f"pool {self.name!r}: {detail}")


def _pop(free: list[int], count: int) -> list[int]:
    """The next slots of one stack."""
    if not count:
        return []
    slots = free[: -count - 1 : -1]
    del free[-count:]
    return slots
