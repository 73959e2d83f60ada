"""Operations over pools that keep every page and pools that keep only the last ones."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.errors import UsageError
from kvcoord.memory.hybrid import HybridReservation, PageMap, PoolShare, reserve_hybrid
from kvcoord.memory.reservation import Refusal
from kvcoord.memory.slots import SlotPool

OPERATIONS = 100_000


def shares(kv: int = 40, indexer: int = 40, window: int = 12, state: int = 4) -> list[PoolShare]:
    return [
        PoolShare(SlotPool("kv", kv)),
        PoolShare(SlotPool("indexer", indexer)),
        PoolShare(SlotPool("window", window), window_pages=3),
        PoolShare(SlotPool("state", state), window_pages=1),
    ]


def taken(of: Sequence[PoolShare], pages: int, owner: str = "op") -> HybridReservation:
    reservation = reserve_hybrid(of, pages, owner)
    assert isinstance(reservation, HybridReservation)
    return reservation


def test_each_pool_gives_what_it_needs_and_the_page_maps_say_which_page_is_where() -> None:
    held = taken(shares(), 8)
    assert [len(held.maps[name].slots) for name in ("kv", "indexer", "window", "state")] == [8, 8, 3, 1]
    window, state = held.maps["window"], held.maps["state"]
    assert [window.slot(page) for page in (4, 5, 7, 8)] == [None, window.slots[0], window.slots[2], None]
    assert [state.slot(page) for page in (6, 7)] == [None, state.slots[0]]
    held.reservation.abort()


def test_a_sequence_shorter_than_the_window_has_all_of_its_pages_there() -> None:
    held = taken(shares(), 2)
    assert [held.maps["window"].slot(page) for page in range(2)] == held.maps["window"].slots
    held.reservation.abort()


@pytest.mark.parametrize(("pool", "kept"), [("kv", 7), ("indexer", 7), ("window", 2), ("state", 0)])
def test_when_one_pool_is_short_nothing_is_reserved_and_the_shortfall_names_it(pool: str, kept: int) -> None:
    of = shares(**{pool: kept})
    refusal = reserve_hybrid(of, 8, "op")
    assert isinstance(refusal, Refusal)
    assert refusal.shortfall == {pool: 1}
    assert all(share.pool.free_count == share.pool.capacity for share in of)


def test_a_page_map_is_fixed_when_the_pages_are_reserved() -> None:
    of = shares()
    first = taken(of, 4, "first")
    slots = {name: list(held.slots) for name, held in first.maps.items()}
    second = taken(of, 4, "second")
    second.reservation.abort()
    third = taken(of, 5, "third")
    assert {name: held.slots for name, held in first.maps.items()} == slots
    for held in (first, third):
        held.reservation.abort()


@pytest.mark.parametrize(
    ("landed", "usable"),
    [
        ({"kv": 8, "indexer": 8, "window": 3, "state": 1}, 8),
        ({"kv": 6, "indexer": 4, "window": 3, "state": 1}, 0),
        ({"kv": 8, "indexer": 8, "window": 2, "state": 1}, 0),
        ({"kv": 8, "indexer": 8, "window": 3, "state": 0}, 0),
    ],
)
def test_a_prefix_is_usable_only_with_its_own_window_and_its_own_state(landed: dict[str, int], usable: int) -> None:
    held = taken(shares(), 8)
    assert held.usable_prefix(landed) == usable
    held.reservation.abort()


def test_pools_that_keep_every_page_serve_the_shortest_of_their_prefixes() -> None:
    of = [PoolShare(SlotPool("kv", 8)), PoolShare(SlotPool("indexer", 8))]
    held = taken(of, 8)
    assert held.usable_prefix({"kv": 6, "indexer": 4}) == 4
    assert held.usable_prefix({"kv": 6, "indexer": 4}, limit=3) == 3
    with pytest.raises(UsageError):
        held.usable_prefix({"kv": 6})
    held.reservation.abort()


def test_ranks_settle_on_a_prefix_that_each_of_them_can_serve() -> None:
    ranks = [taken(shares(), 8) for _ in range(2)]
    landed = [{"kv": 8, "indexer": 8, "window": 3, "state": 1}, {"kv": 5, "indexer": 8, "window": 3, "state": 1}]
    limit, asked = 8, 0
    while (found := [rank.usable_prefix(of, limit) for rank, of in zip(ranks, landed, strict=True)]) != [limit] * 2:
        limit, asked = min(found), asked + 1
    assert (limit, asked) == (0, 1)
    for rank in ranks:
        rank.reservation.abort()


@given(pages=st.integers(0, 12), window=st.integers(0, 5), landed=st.integers(0, 12), limit=st.integers(0, 12))
def test_the_usable_prefix_is_the_longest_whose_window_is_all_there(
    pages: int, window: int, landed: int, limit: int
) -> None:
    first = max(0, pages - window) if window else 0
    landed = min(landed, pages - first)
    held = PageMap(first, list(range(pages - first)), window)
    there = set(range(first, first + landed))
    fits = [
        prefix
        for prefix in range(min(limit, pages) + 1)
        if set(range(max(0, prefix - window) if window else 0, prefix)) <= there
    ]
    assert held.usable(landed, min(limit, pages)) == max(fits)


def test_after_100_000_operations_under_random_failures_every_pool_has_all_of_its_slots() -> None:
    rng = random.Random(6)
    of = shares()
    running: list[HybridReservation] = []
    seen = {"refused": 0, "aborted": 0, "failed": 0, "landed": 0}
    for number in range(OPERATIONS):
        held = reserve_hybrid(of, rng.randint(0, 9), f"op/{number}")
        if isinstance(held, Refusal):
            seen["refused"] += 1
            end(running.pop(rng.randrange(len(running))), of, rng, seen)
        else:
            running.append(held)
        if running and rng.random() < 0.4:
            end(running.pop(rng.randrange(len(running))), of, rng, seen)
        if number % 1000 == 0:
            check(of, running)
    for held in running:
        held.reservation.abort()
    check(of, [])
    assert all(share.pool.free_count == share.pool.capacity for share in of)
    assert min(seen.values()) > OPERATIONS // 20


def end(held: HybridReservation, of: Sequence[PoolShare], rng: random.Random, seen: dict[str, int]) -> None:
    """An operation is voted down, fails while it copies, or lands and is evicted later."""
    what = rng.choice(["aborted", "failed", "landed"])
    seen[what] += 1
    if what == "aborted":
        held.reservation.abort()
    elif what == "failed":
        held.reservation.quarantine()
        held.reservation.release()
    else:
        held.reservation.commit()
        for share in of:
            share.pool.free(held.maps[share.pool.name].slots, held.reservation.owner)


def check(of: Sequence[PoolShare], running: Sequence[HybridReservation]) -> None:
    for share in of:
        share.pool.check()
        slots = [slot for held in running for slot in held.maps[share.pool.name].slots]
        assert len(set(slots)) == len(slots) == share.pool.reserved_count
