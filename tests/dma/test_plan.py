from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.dma.pieces import runs
from kvcoord.errors import UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from tests.dma.pools import CAPACITY, LAYERS, PAGE_BYTES, Pools

SLOTS = st.lists(st.integers(0, 9), max_size=40)


@pytest.mark.parametrize(
    ("source_slots", "destination_slots", "expected"),
    [
        ([], [], []),
        ([7], [3], [(7, 3, 1)]),
        ([0, 1, 2, 3], [8, 9, 10, 11], [(0, 8, 4)]),
        ([0, 1, 2, 3], [8, 9, 11, 12], [(0, 8, 2), (2, 11, 2)]),
        ([0, 1, 5, 6], [8, 9, 10, 11], [(0, 8, 2), (5, 10, 2)]),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
    ],
)
def test_pages_adjacent_on_both_sides_are_one_run(
    source_slots: list[int], destination_slots: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert runs(source_slots, destination_slots) == expected


@given(SLOTS, SLOTS)
def test_runs_name_the_same_pairs_in_the_same_order_and_cannot_be_merged_further(
    source_slots: list[int], destination_slots: list[int]
) -> None:
    count = min(len(source_slots), len(destination_slots))
    pairs = list(zip(source_slots[:count], destination_slots[:count], strict=True))
    merged = runs(source_slots[:count], destination_slots[:count])
    assert [(source + i, destination + i) for source, destination, length in merged for i in range(length)] == pairs
    for (source, destination, length), following in pairwise(merged):
        assert (source + length, destination + length) != following[:2]


@pytest.mark.parametrize(
    ("source_slots", "destination_slots", "field", "value"),
    [
        ([0, 1], [0], "slots", (2, 1)),
        ([0, CAPACITY], [0, 1], "source_slots", CAPACITY),
        ([-1], [0], "source_slots", -1),
        ([0, 1], [0, CAPACITY], "destination_slots", CAPACITY),
        ([0], [-7], "destination_slots", -7),
    ],
)
def test_slots_that_do_not_pair_or_do_not_exist_are_refused(
    pools: Pools, source_slots: list[int], destination_slots: list[int], field: str, value: object
) -> None:
    with pytest.raises(UsageError) as caught:
        PoolCopy(pools.device, pools.host, source_slots, destination_slots)
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (PoolGeometry("kv", LAYERS + 1, PAGE_BYTES, "bfloat16"), "layer_count"),
        (PoolGeometry("kv", LAYERS, PAGE_BYTES * 2, "bfloat16"), "page_bytes"),
        (PoolGeometry("kv", LAYERS, PAGE_BYTES, "float16"), "dtype"),
    ],
)
def test_memories_whose_pages_differ_in_shape_are_refused(pools: Pools, other: PoolGeometry, field: str) -> None:
    with PageMemory.anonymous(other, CAPACITY) as memory, pytest.raises(UsageError) as caught:
        PoolCopy(pools.device, memory, [0], [0])
    assert caught.value.field == field


def test_memories_of_one_shape_may_differ_in_capacity(pools: Pools) -> None:
    with PageMemory.anonymous(pools.geometry, CAPACITY * 2) as memory:
        copy = PoolCopy(pools.device, memory, [CAPACITY - 1], [CAPACITY * 2 - 1])
        assert copy.runs == [(CAPACITY - 1, CAPACITY * 2 - 1, 1)]


def test_a_plan_without_a_pool_is_refused() -> None:
    with pytest.raises(UsageError):
        CopyPlan("write/1", Direction.DEVICE_TO_HOST, ())


def test_a_plan_counts_the_bytes_and_runs_of_each_pool_by_its_own_layers(pools: Pools) -> None:
    state = Pools(PoolGeometry("state", 2, 32, "float32"))
    parts = (pools.backup([0, 1, 5], [0, 1, 2]), state.backup([4], [9]))
    plan = CopyPlan("write/1", Direction.DEVICE_TO_HOST, parts)
    assert plan.layer_count == LAYERS
    assert plan.total_bytes == 3 * PAGE_BYTES * LAYERS + 32 * 2
    assert plan.run_count == 2 * LAYERS + 1 * 2


def test_a_plan_keeps_the_slots_it_was_made_with(pools: Pools) -> None:
    source_slots, destination_slots = [1, 2], [3, 4]
    copy = pools.backup(source_slots, destination_slots)
    source_slots[0] = destination_slots[0] = 50
    assert copy.runs == [(1, 3, 2)]
