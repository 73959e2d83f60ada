"""What a worker keeps is looked at by no collection, and garbage among it is found between two lives."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvcoord.runtime.garbage import collect_everything, survivors_set_aside

MIDDLE = 1
OLDEST = 2


class Node:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    gc.collect()
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_survives_is_set_aside_so_that_a_full_collection_has_nothing_to_look_at() -> None:
    with survivors_set_aside():
        kept = [Node() for _ in range(10_000)]
        gc.collect(MIDDLE)
        gc.collect(MIDDLE)
        assert gc.get_freeze_count() >= len(kept)
        assert len(gc.get_objects(OLDEST)) < len(kept)
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects(OLDEST)) >= len(kept)


def test_without_it_a_full_collection_looks_at_everything() -> None:
    kept = [Node() for _ in range(10_000)]
    gc.collect(MIDDLE)
    gc.collect(MIDDLE)
    assert len(gc.get_objects(OLDEST)) >= len(kept)
    assert gc.get_freeze_count() == 0


def test_what_is_dropped_without_a_cycle_goes_at_once_also_when_it_was_set_aside() -> None:
    with survivors_set_aside():
        node = Node()
        seen = weakref.ref(node)
        gc.collect(MIDDLE)
        del node
        assert seen() is None


def test_a_cycle_that_was_set_aside_is_found_when_everything_is_looked_at() -> None:
    with survivors_set_aside():
        first, second = Node(), Node()
        first.other, second.other = second, first
        seen = weakref.ref(first)
        gc.collect(MIDDLE)
        del first, second
        gc.collect()
        assert seen() is not None
        collect_everything()
        assert seen() is None
