"""One pool: whole sets or nothing, four states, and an error that changes nothing for every rule broken."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.errors import (
    InvariantBroken,
    PoolError,
    SlotFreedTwice,
    SlotNotAllocated,
    SlotOwnerMismatch,
    SlotStateMismatch,
    UsageError,
)
from kvcoord.memory.slots import SlotPool, SlotState, SlotStatistics

Call = Callable[[SlotPool, list[int], str], None]


def hand_to_index(pool: SlotPool, slots: list[int], owner: str) -> None:
    pool.hand_over(slots, owner, "index")


CALLS = {
    "commit": SlotPool.commit,
    "free": SlotPool.free,
    "quarantine": SlotPool.quarantine,
    "release": SlotPool.release,
    "hand_over": hand_to_index,
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def taken(pool: SlotPool, count: int, owner: str) -> list[int]:
    slots = pool.reserve(count, owner)
    assert slots is not None
    return slots


def picture(pool: SlotPool) -> list[Any]:
    """Everything that can be seen of a pool."""
    slots = range(pool.capacity)
    return [pool.statistics(), [pool.state(slot) for slot in slots], [pool.owner(slot) for slot in slots]]


def refused(pool: SlotPool, call: Call, slots: list[int], owner: str) -> PoolError:
    """The error of a call that must fail; the pool and its next slots to hand out are as before."""
    before = picture(pool)
    with pytest.raises(PoolError) as caught:
        call(pool, slots, owner)
    assert picture(pool) == before
    pool.check()
    return caught.value


def pool_with_every_state() -> SlotPool:
    """Slots 0-1 reserved, 2-3 used, 4-5 quarantined, 6-7 freed, all by op; 8-9 used by other; 10-11 never taken."""
    pool = SlotPool("host", 12)
    slots = taken(pool, 8, "op")
    other = taken(pool, 2, "other")
    pool.commit(slots[2:4], "op")
    pool.commit(other, "other")
    pool.quarantine(slots[4:6], "op")
    pool.free(slots[6:8], "op")
    return pool


def test_a_fresh_pool_hands_out_its_slots_in_ascending_order() -> None:
    pool = SlotPool("host", 8)
    assert taken(pool, 3, "a") == [0, 1, 2]
    assert taken(pool, 0, "b") == []
    assert taken(pool, 5, "c") == [3, 4, 5, 6, 7]
    assert pool.free_count == 0


def test_a_freed_run_is_handed_out_again_as_the_same_run() -> None:
    pool = SlotPool("host", 12)
    first, second = taken(pool, 4, "a"), taken(pool, 4, "b")
    pool.free(first, "a")
    assert taken(pool, 4, "c") == first
    pool.quarantine(second, "b")
    pool.release(second, "b")
    assert taken(pool, 6, "d") == [*second, 8, 9]


def test_a_reserve_gives_the_whole_set_or_nothing() -> None:
    pool = SlotPool("host", 8)
    taken(pool, 1, "older")
    before = picture(pool)
    assert pool.reserve(8, "op") is None
    assert picture(pool) == before
    assert taken(pool, 7, "op") == [1, 2, 3, 4, 5, 6, 7]
    assert pool.reserve(1, "next") is None


def test_a_negative_number_of_slots_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        SlotPool("host", -1)
    pool = SlotPool("host", 2)
    with pytest.raises(UsageError):
        pool.reserve(-1, "op")
    assert pool.free_count == 2


def test_a_slot_goes_through_its_states_and_the_counters_follow() -> None:
    pool = pool_with_every_state()
    assert pool.statistics() == SlotStatistics("host", capacity=12, free=4, reserved=2, used=4, quarantined=2)
    counts = (pool.free_count, pool.reserved_count, pool.used_count, pool.quarantined_count)
    assert counts == (4, 2, 4, 2)
    assert [pool.state(slot) for slot in (0, 2, 4, 6, 10)] == [
        SlotState.RESERVED,
        SlotState.USED,
        SlotState.QUARANTINED,
        SlotState.FREE,
        SlotState.FREE,
    ]
    assert [pool.owner(slot) for slot in (0, 2, 4, 6, 8, 10)] == ["op", "op", "op", None, "other", None]


def test_reserved_and_used_slots_are_freed_or_quarantined_in_one_call() -> None:
    pool = SlotPool("host", 6)
    slots = taken(pool, 6, "op")
    pool.commit(slots[:3], "op")
    pool.free([1, 4], "op")
    pool.quarantine([0, 2, 3], "op")
    assert pool.statistics() == SlotStatistics("host", capacity=6, free=2, reserved=1, used=0, quarantined=3)
    pool.check()


def test_a_quarantined_slot_is_not_handed_out_before_its_release() -> None:
    pool = SlotPool("host", 2)
    slots = taken(pool, 2, "op")
    pool.quarantine(slots, "op")
    assert pool.reserve(1, "next") is None
    pool.release(slots, "op")
    assert taken(pool, 2, "next") == slots


def test_a_hand_over_leaves_the_slots_used_and_only_the_new_owner_frees_them() -> None:
    pool = SlotPool("host", 5)
    slots = taken(pool, 4, "op")
    pool.commit(slots, "op")
    pool.hand_over([3, 0, 1], "op", "index")
    assert [pool.owner(slot) for slot in slots] == ["index", "index", "op", "index"]
    assert pool.used_count == 4
    assert isinstance(refused(pool, SlotPool.free, [0], "op"), SlotOwnerMismatch)
    pool.free([0, 1, 3], "index")
    assert (pool.free_count, pool.used_count) == (4, 1)


def test_three_wrong_frees_are_three_distinct_errors_and_change_nothing() -> None:
    pool = SlotPool("host", 8)
    freed, _ = taken(pool, 2, "op"), taken(pool, 2, "other")
    pool.free(freed, "op")
    never, twice, foreign = (refused(pool, SlotPool.free, [slot], "op") for slot in (7, 0, 2))
    assert [type(error) for error in (never, twice, foreign)] == [SlotNotAllocated, SlotFreedTwice, SlotOwnerMismatch]
    assert (never.pool, never.slot, never.owner, never.found) == ("host", 7, "op", None)
    assert (twice.slot, twice.owner, twice.found) == (0, "op", "op")
    assert (foreign.slot, foreign.owner, foreign.found) == (2, "op", "other")


@every_call
@pytest.mark.parametrize("outside", [-1, -12, 12, 99])
def test_a_slot_outside_the_pool_is_never_allocated(call: Call, outside: int) -> None:
    pool = pool_with_every_state()
    for slots in ([outside], [outside, 2], [outside, outside + 1]):
        error = refused(pool, call, slots, "op")
        assert (type(error), error.slot, error.found) == (SlotNotAllocated, outside, None)
    with pytest.raises(SlotNotAllocated):
        pool.state(outside)
    with pytest.raises(SlotNotAllocated):
        pool.owner(outside)


@every_call
def test_a_slot_that_was_never_handed_out_or_is_free_again_is_told_apart(call: Call) -> None:
    pool = pool_with_every_state()
    assert isinstance(refused(pool, call, [10], "op"), SlotNotAllocated)
    assert isinstance(refused(pool, call, [10, 11], "op"), SlotNotAllocated)
    assert isinstance(refused(pool, call, [6, 7], "op"), SlotFreedTwice)
    again = refused(pool, call, [7], "late")
    assert isinstance(again, SlotFreedTwice)
    assert (again.owner, again.found) == ("late", "op")


@every_call
def test_a_slot_of_another_owner_is_refused_before_its_state_is_looked_at(call: Call) -> None:
    error = refused(pool_with_every_state(), call, [8, 9], "op")
    assert isinstance(error, SlotOwnerMismatch)
    assert error.found == "other"


@pytest.mark.parametrize(
    ("call", "slot", "found"),
    [
        ("commit", 2, "used"),
        ("commit", 4, "quarantined"),
        ("free", 4, "quarantined"),
        ("quarantine", 4, "quarantined"),
        ("release", 0, "reserved"),
        ("release", 2, "used"),
        ("hand_over", 0, "reserved"),
        ("hand_over", 4, "quarantined"),
    ],
)
def test_a_change_from_a_state_that_does_not_allow_it_is_refused(call: str, slot: int, found: str) -> None:
    for slots in ([slot], [slot, slot + 1], [slot + 1, slot]):
        error = refused(pool_with_every_state(), CALLS[call], slots, "op")
        assert isinstance(error, SlotStateMismatch)
        assert (error.slot, error.found) == (slots[0], found)


@pytest.mark.parametrize("slots", [[0, 0], [0, 1, 0], [1, 0, 1]])
@pytest.mark.parametrize(
    ("call", "before"),
    [
        (SlotPool.commit, None),
        (SlotPool.free, None),
        (SlotPool.quarantine, None),
        (SlotPool.release, SlotPool.quarantine),
        (hand_to_index, SlotPool.commit),
    ],
)
def test_a_slot_named_twice_in_one_call_counts_as_freed_twice(
    call: Call, before: Call | None, slots: list[int]
) -> None:
    pool = SlotPool("host", 4)
    held = taken(pool, 2, "op")
    if before is not None:
        before(pool, held, "op")
    error = refused(pool, call, slots, "op")
    assert isinstance(error, SlotFreedTwice)
    assert error.slot == slots[-1]


def test_one_wrong_slot_at_the_end_keeps_all_slots_before_it_unchanged() -> None:
    pool = pool_with_every_state()
    error = refused(pool, SlotPool.free, [0, 1, 2, 3, 8], "op")
    assert (type(error), error.slot) == (SlotOwnerMismatch, 8)
    error = refused(pool, SlotPool.free, [3, 0, 2, 4], "op")
    assert (type(error), error.slot) == (SlotStateMismatch, 4)


def test_the_error_names_the_first_slot_in_the_order_of_the_call() -> None:
    pool = pool_with_every_state()
    assert [refused(pool, SlotPool.free, slots, "op").slot for slots in ([0, 8, 10], [0, 10, 8], [6, 8, 0])] == [
        8,
        10,
        6,
    ]


@given(st.permutations(range(8)), st.integers(0, 8))
def test_slots_come_back_in_any_order_and_portions(order: list[int], cut: int) -> None:
    pool = SlotPool("host", 10)
    taken(pool, 8, "op")
    for slots in (order[:cut], tuple(order[cut:])):
        pool.commit(slots, "op")
        pool.hand_over(slots, "op", "index")
        pool.free(slots, "index")
        pool.check()
    assert pool.free_count == 10
    assert sorted(taken(pool, 10, "next")) == list(range(10))


def test_a_range_of_slots_is_taken_like_a_list() -> None:
    pool = SlotPool("host", 6)
    taken(pool, 6, "op")
    pool.commit(range(1, 4), "op")
    pool.free(range(3, 0, -1), "op")
    assert (pool.free_count, pool.reserved_count) == (3, 3)
    pool.check()


@pytest.mark.parametrize("damage", ["counter", "state", "free twice", "free lost", "owner", "length"])
def test_the_recount_finds_books_that_do_not_agree(damage: str) -> None:
    pool = pool_with_every_state()
    pool.check()
    if damage == "counter":
        pool._counts[SlotState.USED] += 1
    elif damage == "state":
        pool._states[0] = SlotState.USED
    elif damage == "free twice":
        pool._free[0][0] = pool._free[0][1]
    elif damage == "free lost":
        pool._free[0].pop()
    elif damage == "owner":
        pool._owners[0] = None
    else:
        pool._owners.append(None)
    with pytest.raises(InvariantBroken) as caught:
        pool.check()
    assert caught.value.invariant == "conservation"
    assert "'host'" in caught.value.detail


def test_slots_of_an_earlier_life_are_claimed_by_number_and_not_handed_out_again() -> None:
    pool = SlotPool("host.kv", 8)
    pool.claim([5, 1, 6], "index")
    pool.check()
    assert (pool.used_count, pool.free_count) == (3, 5)
    assert pool.reserve(5, "op") == [0, 2, 3, 4, 7]
    pool.free([1, 5, 6], "index")
    assert pool.reserve(3, "op") == [1, 5, 6]


@pytest.mark.parametrize(
    ("slots", "error"), [([2, 8], SlotNotAllocated), ([2, 0], SlotStateMismatch), ([2, 2], SlotStateMismatch)]
)
def test_a_slot_that_is_not_free_or_does_not_exist_cannot_be_claimed(slots: list[int], error: type[PoolError]) -> None:
    pool = SlotPool("host.kv", 8)
    pool.reserve(1, "op")
    with pytest.raises(error):
        pool.claim(slots, "index")
    assert pool.free_count == 7
    pool.check()
