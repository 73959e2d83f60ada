"""Pages held in several pools for one operation whose outcome is not known yet: in all of the pools, or in none.

A reservation is settled exactly once:

    HELD -commit-> COMMITTED            the slots are USED and still belong to the owner
    HELD -abort-> ABORTED               the slots are FREE
    HELD -quarantine-> QUARANTINED -release-> RELEASED      FREE only once the copy that touches them is over

A second settlement raises `InvariantBroken`: only kvcoord settles reservations, so it is kvcoord that is wrong, and the
first settlement stands. It does not evict, retry or wait: a refusal is a value, with the pages missing in every pool.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from kvcoord.domain import PoolName
from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.memory.slots import SlotPool


class ReservationState(StrEnum):
    HELD = "held"
    COMMITTED = "committed"
    ABORTED = "aborted"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Refusal(msgspec.Struct, frozen=True):
    """Nothing was reserved. `shortfall` is the pages missing, > 0, in each pool that is short."""

    owner: str
    shortfall: dict[PoolName, int]

    def __bool__(self) -> bool:
        return False


class Reservation:
    """The slots of one owner in each pool, made by `reserve`.

    `slots` maps pool name to slots, in the order in which they were handed out; it is fixed when the reservation is
    taken and stays readable after it is settled. A pool asked for 0 pages is there with an empty list.

    Dropped while pages still hang on it (HELD or QUARANTINED) it gives a `ResourceWarning` that names the owner, and
    does nothing else: the pages stay held, since a copy may touch them.

    Settling raises `InvariantBroken` when already settled. It raises `PoolError` when somebody else has changed one of
    its slots: then the reservation counts as settled, that pool and those named after it are unchanged.
    """

    __slots__ = ("_pools", "owner", "slots", "state")

    def __init__(self, owner: str, pools: tuple[SlotPool, ...], slots: dict[PoolName, list[int]]) -> None:
        self.owner = owner
        self.slots = slots
        self.state = ReservationState.HELD
        self._pools = pools

    def commit(self) -> None:
        """RESERVED -> USED in every pool. From now on the owner frees, quarantines or hands over at the pools."""
        self._settle(ReservationState.HELD, ReservationState.COMMITTED, SlotPool.commit)

    def abort(self) -> None:
        """RESERVED -> FREE in every pool. No copy may touch the slots."""
        self._settle(ReservationState.HELD, ReservationState.ABORTED, SlotPool.free)

    def quarantine(self) -> None:
        """RESERVED -> QUARANTINED in every pool: given up while a copy touches them. `release` must follow."""
        self._settle(ReservationState.HELD, ReservationState.QUARANTINED, SlotPool.quarantine)

    def release(self) -> None:
        """QUARANTINED -> FREE in every pool: the copy is over."""
        self._settle(ReservationState.QUARANTINED, ReservationState.RELEASED, SlotPool.release)

    def _settle(
        self, before: ReservationState, after: ReservationState, change: Callable[[SlotPool, list[int], str], None]
    ) -> None:
        if self.state is not before:
            raise InvariantBroken(
                "a reservation is settled once", f"{self.owner!r} is {self.state} and cannot become {after}"
            )
        self.state = after
        for pool in self._pools:
            change(pool, self.slots[pool.name], self.owner)

    def __del__(
        self,
        # Bound here because the module may already be torn down when the last reservation goes.
        _warn: Callable[..., None] = warnings.warn,
        _is_finalizing: Callable[[], bool] = sys.is_finalizing,
        _open_states: tuple[ReservationState, ...] = (ReservationState.HELD, ReservationState.QUARANTINED),
        _category: type[Warning] = ResourceWarning,
    ) -> None:
        if self.state in _open_states and not _is_finalizing():
            _warn(f"reservation of {self.owner!r} dropped while {self.state}: its pages leak", _category, source=self)


def reserve(pools: Sequence[tuple[SlotPool, int]], owner: str, near: int = -1) -> Reservation | Refusal:
    """Reserve that many pages in each pool for `owner`, or nothing at all; in pools of shares near that slot.

    Raises `UsageError`, before anything is held, when a pool name occurs twice or a count is negative.
    """
    shortfall: dict[PoolName, int] = {}
    names: set[PoolName] = set()
    for pool, count in pools:
        if count < 0:
            raise UsageError(f"pages to reserve in pool {pool.name}", count, "give a number >= 0")
        if pool.name in names:
            raise UsageError("pools", pool.name, "name each pool once")
        names.add(pool.name)
        if count > pool.free_count:
            shortfall[pool.name] = count - pool.free_count
    if shortfall:
        return Refusal(owner, shortfall)
    slots: dict[PoolName, list[int]] = {}
    for pool, count in pools:
        taken = pool.reserve(count, owner, near)
        if taken is None:
            raise InvariantBroken("conservation", f"pool {pool.name!r} counts more free slots than it hands out")
        slots[pool.name] = taken
    return Reservation(owner, tuple(pool for pool, _ in pools), slots)
