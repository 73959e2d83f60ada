"""What an engine of a replay reads and writes: every wrong byte is seen, and only those pages are counted."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.index.keys import block_page_keys
from kvcoord.load.pages import EnginePages, adjacent
from kvcoord.load.pattern import verify
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.protocol.local import NO_SLOT

GEOMETRY = PoolGeometry("kv", 3, 100, "uint8")
KEYS = block_page_keys(range(6))
SLOTS = [7, 8, 2, 3, 4, 0]


@pytest.fixture
def memory() -> Iterator[PageMemory]:
    with PageMemory.anonymous(GEOMETRY, 10) as memory:
        yield memory


@pytest.fixture
def pages(memory: PageMemory) -> Iterator[EnginePages]:
    pages = EnginePages(memory, rank=1)
    yield pages
    pages.close()


def test_filled_pages_hold_the_pattern_of_their_key_in_every_layer(memory: PageMemory, pages: EnginePages) -> None:
    pages.fill(KEYS, SLOTS)
    for key, slot in zip(KEYS, SLOTS, strict=True):
        assert all(verify(memory.view(layer, slot), key, layer, 1, "kv") for layer in range(3))
    assert pages.count_corrupt(KEYS, SLOTS) == 0


def test_pages_beside_the_filled_ones_are_left_alone(memory: PageMemory, pages: EnginePages) -> None:
    pages.fill(KEYS, SLOTS)
    assert all(bytes(memory.view(layer, slot)) == bytes(100) for layer in range(3) for slot in (1, 5, 6, 9))


@pytest.mark.parametrize("layer", range(3))
def test_one_wrong_byte_in_any_layer_makes_one_corrupt_page(memory: PageMemory, pages: EnginePages, layer: int) -> None:
    pages.fill(KEYS, SLOTS)
    memory.view(layer, 3)[99] ^= 1
    assert pages.count_corrupt(KEYS, SLOTS) == 1


def test_a_pool_that_keeps_nothing_of_some_pages_is_filled_and_judged_for_the_others(
    memory: PageMemory, pages: EnginePages
) -> None:
    pages.fill(KEYS[:4], [NO_SLOT, 0, NO_SLOT, 1])
    assert pages.count_corrupt(KEYS[:4], [NO_SLOT, 0, NO_SLOT, 1]) == 0
    assert pages.count_corrupt(KEYS[:2], [NO_SLOT, 1]) == 1
    assert all(bytes(memory.view(layer, 9)) == bytes(100) for layer in range(3)), "the last slot is none of these"


def test_pages_of_another_order_or_another_rank_are_corrupt(memory: PageMemory, pages: EnginePages) -> None:
    pages.fill(KEYS, SLOTS)
    assert pages.count_corrupt(KEYS, [8, 7, 2, 3, 4, 0]) == 2
    other = EnginePages(memory, rank=0)
    assert other.count_corrupt(KEYS, SLOTS) == len(KEYS)
    other.close()


@given(st.lists(st.integers(0, 20)))
def test_runs_of_neighbours_name_every_slot_once_in_order(slots: Sequence[int]) -> None:
    runs = list(adjacent(slots))
    assert [slot + at for _, slot, count in runs for at in range(count)] == slots
    assert [first for first, _, _ in runs] == [sum(count for _, _, count in runs[:at]) for at in range(len(runs))]
    assert all(slot + count != following for (_, slot, count), (_, following, _) in pairwise(runs))
