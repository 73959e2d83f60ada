"""What a user passes, checked and brought into the form in which it travels. Pure.

A value that the worker could not even read would end the session, so nothing else leaves here. All functions raise
UsageError with the argument's name, its value and the fix.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from kvcoord.domain import OPERATION_ID_LENGTH_MAX, PAGE_KEY_BYTES, Agreement, OperationId, PageKey, Rank, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.protocol.local import Agree, LoadBack, Opened, Slots, WriteThrough, join_keys

DeviceSlots = Sequence[int] | Sequence[Sequence[int]]
"""Slots of the group's only pool, or one list for each pool, in the group's order."""

COUNT_MAX: Final = 2**53
PARTICIPANTS_MAX: Final = 64
"""Ranks that a participants mask can name on the wire."""

_INT: Final = {int}
_KEY_LENGTHS: Final = {PAGE_KEY_BYTES}


def keys_of(page_keys: Sequence[PageKey], name: str = "page_keys") -> bytes:
    """Page keys, root first, as one string of bytes."""
    try:
        if set(map(len, page_keys)) == _KEY_LENGTHS:
            return join_keys(page_keys if isinstance(page_keys, list) else list(page_keys))
    except TypeError:
        pass
    fix = f"give one or more page keys as bytes, {PAGE_KEY_BYTES} each"
    raise UsageError(name, _shown(page_keys), fix)


def slots_of(device_slots: DeviceSlots, info: Opened, pages_max: int | None = None) -> Slots:
    """One list of slots for each pool, equally long where every page has one, at most `pages_max`. Copied: the caller
    keeps its own."""
    pool_count = len(info.pools)
    try:
        if pool_count == 1 and not (device_slots and isinstance(device_slots[0], Sequence)):
            slots: Slots = [list(device_slots)]  # type: ignore[arg-type]
        else:
            slots = [list(pool) for pool in device_slots]  # type: ignore[arg-type]
    except TypeError:
        raise _misshapen(device_slots, pool_count) from None
    page_pools = pool_count - sum(map(bool, info.windows))
    if len(slots) != pool_count or len(set(map(len, slots[:page_pools]))) != 1:
        raise _misshapen(device_slots, pool_count)
    count = len(slots[0])
    if pages_max is not None and count > pages_max:
        raise UsageError("device_slots", count, f"there are only {pages_max} page keys: give at most one slot for each")
    for pool, capacity in zip(slots, info.device_slots or [info.device_pages] * pool_count, strict=True):
        if pool and (set(map(type, pool)) != _INT or min(pool) < 0 or max(pool) >= capacity):
            fix = f"slots are ints from 0 to {capacity - 1}, the device pages of this rank"
            raise UsageError("device_slots", _shown(pool), fix)
    return slots


def count_of(name: str, value: int, fix: str) -> int:
    """A count or a number, not negative."""
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise UsageError(name, value, fix)
    return value


def tier_of(tier: Tier | str) -> Tier:
    try:
        return Tier(tier)
    except ValueError:
        raise UsageError("tier", tier, f"name one of {[str(known) for known in Tier]}") from None


def operation_of(operation: OperationId, *, needed: bool = False) -> OperationId:
    """An id that all ranks choose alike; empty where the worker numbers operations itself."""
    if not isinstance(operation, str) or len(operation) > OPERATION_ID_LENGTH_MAX or (needed and not operation):
        fix = f"name the operation alike on all ranks, with 1 to {OPERATION_ID_LENGTH_MAX} characters"
        raise UsageError("operation", operation, fix)
    return operation


def write_of(
    info: Opened, page_keys: Sequence[PageKey], device_slots: DeviceSlots, operation: OperationId, deferred: bool
) -> WriteThrough:
    """A write of the last pages of a path, as many as there are slots."""
    keys = keys_of(page_keys)
    slots = slots_of(device_slots, info, len(page_keys))
    return WriteThrough(keys, slots, 0, operation_of(operation), bool(deferred))


def load_of(info: Opened, page_keys: Sequence[PageKey], device_slots: DeviceSlots, operation: OperationId) -> LoadBack:
    """A load-back whose layers are reported one by one."""
    return LoadBack(keys_of(page_keys), slots_of(device_slots, info), operation_of(operation), False)


class VoteFields(TypedDict, total=False):
    """What a vote on something of the engine's own may say beyond yes or no."""

    agreement: Agreement | str
    """How the votes combine; ALL when left out. The same on every rank."""

    value: int | Sequence[PageKey] | None
    """With a yes: an int for MIN, MAX and EQUAL, keys for INTERSECT."""

    participants: Iterable[Rank]
    """The ranks that vote, all when left out. The same on every rank."""

    reason: Reason | str | None
    """With a no; REFUSED when left out."""

    shortfall: Mapping[str, int] | None
    """With a no: pages missing, by pool."""


def agree_of(
    info: Opened,
    operation: OperationId,
    yes: bool,
    *,
    deferred: bool,
    agreement: Agreement | str = Agreement.ALL,
    value: int | Sequence[PageKey] | None = None,
    participants: Iterable[Rank] = (),
    reason: Reason | str | None = None,
    shortfall: Mapping[str, int] | None = None,
) -> Agree:
    """A vote of this rank: see `VoteFields`."""
    try:
        kind = Agreement(agreement)
    except ValueError:
        raise UsageError("agreement", agreement, f"name one of {[str(known) for known in Agreement]}") from None
    if yes and (reason is not None or shortfall):
        raise UsageError("reason", reason, "only a no has a reason and a shortfall")
    try:
        why = None if reason is None else Reason(reason)
    except ValueError:
        raise UsageError("reason", reason, "name a kvcoord.domain.Reason") from None
    return Agree(
        operation_of(operation, needed=True),
        bool(yes),
        kind,
        _mask(participants, info.world_size),
        _vote_value(kind, value) if yes else None,
        why,
        {
            str(pool): count_of("shortfall", pages, "count the pages missing, at least 0")
            for pool, pages in sorted((shortfall or {}).items())
        },
        bool(deferred),
    )


def _vote_value(agreement: Agreement, value: int | Sequence[PageKey] | None) -> int | list[bytes] | None:
    if agreement is Agreement.ALL:
        if value is None:
            return None
        raise UsageError("value", value, "an agreement ALL has no value: leave it out, or name another agreement")
    if agreement is Agreement.INTERSECT:
        if isinstance(value, Sequence) and all(isinstance(key, bytes) for key in value):
            return list(value)
        raise UsageError("value", _shown(value), "an agreement INTERSECT is about a list of keys, each of them bytes")
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise UsageError("value", _shown(value), f"an agreement {agreement.name} is about an int of 64 bits")


def _mask(participants: Iterable[Rank], world_size: int) -> int:
    mask = 0
    for rank in participants:
        if type(rank) is not int or not 0 <= rank < min(world_size, PARTICIPANTS_MAX):
            fix = f"name ranks from 0 to {min(world_size, PARTICIPANTS_MAX) - 1}, or none for all"
            raise UsageError("participants", rank, fix)
        mask |= 1 << rank
    return mask


def _misshapen(device_slots: object, pool_count: int) -> UsageError:
    fix = f"give one list for each of the {pool_count} pools, equally long"
    return UsageError("device_slots", _shown(device_slots), fix)


def _shown(value: object) -> object:
    """Enough of it for a message."""
    if isinstance(value, list | tuple) and len(value) > 8:
        return [*value[:8], f"... {len(value)} in all"]
    return value
