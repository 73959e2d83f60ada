"""Host slots that are numbered through the ranks that keep them, and pools whose slots come from shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.errors import InvariantBroken, UsageError
from kvcoord.memory.shares import Shares
from kvcoord.memory.slots import SlotPool


@pytest.mark.parametrize(("rank", "own", "holders"), [(0, 0, [0, 1]), (1, 1, [0, 1]), (6, 0, [6, 7]), (7, 1, [6, 7])])
def test_neighbours_hold_the_same_and_each_keeps_one_share(rank: int, own: int, holders: list[int]) -> None:
    shares = Shares(rank, 8, 2, 10)
    assert (shares.own, list(shares.holders)) == (own, holders)


def test_a_slot_says_who_keeps_it_and_where() -> None:
    shares = Shares(5, 8, 4, 10)
    assert [(shares.share_of(slot), shares.place(slot)) for slot in (0, 9, 10, 39)] == [(0, 0), (0, 9), (1, 0), (3, 9)]


def test_the_keepers_of_some_slots_are_one_rank_in_each_set() -> None:
    shares = Shares(0, 8, 4, 10)
    assert shares.keepers([]) == 0
    assert shares.keepers([3, 7]) == 0b0001_0001
    assert shares.keepers([3, 25, 28]) == 0b0101_0101


def test_slots_come_from_the_emptiest_share_and_stay_together() -> None:
    pool = SlotPool("host.kv", 12, 3)
    assert pool.reserve(2, "a") == [0, 1]
    assert pool.reserve(2, "b") == [4, 5]
    assert pool.reserve(3, "c") == [8, 9, 10]
    assert pool.reserve(2, "d") == [2, 3]
    assert pool.reserve(3, "e") == [6, 7, 11]
    assert pool.reserve(1, "f") is None
    pool.check()


def test_slots_are_near_another_while_its_share_is_not_much_fuller_than_the_emptiest() -> None:
    pool = SlotPool("host.kv", 16, 2)
    assert pool.reserve(3, "a") == [0, 1, 2]
    assert pool.reserve(2, "a", near=2) == [3, 4]
    assert pool.reserve(2, "a", near=4) == [8, 9]
    assert pool.reserve(5, "a", near=9) == [10, 11, 12, 13, 14]
    assert pool.reserve(3, "b", near=14) == [5, 6, 7]
    pool.check()


def test_more_than_a_share_has_comes_from_several() -> None:
    pool = SlotPool("host.kv", 9, 3)
    assert pool.reserve(7, "a") == [0, 1, 2, 3, 4, 5, 6]
    pool.commit([0, 3, 4, 6], "a")
    assert pool.used_by_share() == [1, 2, 1]


def test_a_share_must_divide_the_pool() -> None:
    with pytest.raises(UsageError, match="shares of pool"):
        SlotPool("host.kv", 10, 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 23), st.booleans()), max_size=60))
def test_the_same_calls_give_the_same_slots_and_every_slot_returns_to_its_share(
    calls: list[tuple[int, int, bool]],
) -> None:
    pools = [SlotPool("host.kv", 24, 4), SlotPool("host.kv", 24, 4)]
    held: list[list[int]] = []
    for count, near, gives in calls:
        if gives and held:
            slots = held.pop(near % len(held))
            for pool in pools:
                pool.free(slots, "op")
        else:
            first, second = (pool.reserve(count, "op", near) for pool in pools)
            assert first == second
            if first is None:
                assert count > 24 - sum(map(len, held))
            elif first:
                held.append(first)
        for pool in pools:
            pool.check()
    assert pools[0].free_count == 24 - sum(map(len, held))


def test_the_recount_finds_a_free_slot_in_the_wrong_share() -> None:
    pool = SlotPool("host.kv", 8, 2)
    pool._free[0].append(pool._free[1].pop())
    with pytest.raises(InvariantBroken, match="share"):
        pool.check()
