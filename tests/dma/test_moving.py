"""Both ways to move pieces: the same bytes arrive, nothing else changes, and nothing reaches over an end."""

from collections.abc import Callable
from random import Random

import pytest

from kvcoord.dma.moving import Move, Slices, move_calls
from kvcoord.dma.pieces import Piece, PlanePair
from kvcoord.errors import UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory

GEOMETRY = PoolGeometry("kv", 3, 64, "uint8", parts=2)
CAPACITY = 16

WAYS: dict[str, Callable[[PageMemory, PageMemory], Move]] = {
    "slices": Slices,
    "calls": lambda source, destination: move_calls,
}


def memory(fill: bytes) -> PageMemory:
    made = PageMemory.anonymous(GEOMETRY, CAPACITY)
    with made.buffer() as whole:
        whole[: made.size_bytes] = (fill * made.size_bytes)[: made.size_bytes]
    return made


def content(of: PageMemory) -> bytes:
    with of.buffer() as whole:
        return bytes(whole[: of.size_bytes])


@pytest.mark.parametrize("way", WAYS)
def test_the_pieces_of_every_plane_arrive_and_nothing_else_changes(way: str) -> None:
    source, destination = memory(bytes(Random(1).randbytes(997))), memory(b"\0")
    planes: list[PlanePair] = [(source.planes[plane], destination.planes[plane]) for plane in (0, 3, 5)]
    pieces: list[Piece] = [(0, 96, 32), (32, 224, 128), (511, 0, 1)]
    expected = bytearray(content(destination))
    original = content(source)
    for plane in (0, 3, 5):
        start = plane * source.plane_stride
        for source_offset, destination_offset, size_bytes in pieces:
            there, here = start + destination_offset, start + source_offset
            expected[there : there + size_bytes] = original[here : here + size_bytes]
    WAYS[way](source, destination)(planes, pieces)
    assert content(destination) == expected
    assert content(source) == original


def test_a_slice_over_the_end_is_refused_before_a_byte_is_moved() -> None:
    source, destination = memory(b"\1"), memory(b"\0")
    last: PlanePair = (source.planes[-1], destination.planes[-1])
    with pytest.raises(ValueError, match="different structures"):
        Slices(source, destination)([last], [(0, destination.plane_stride - 16 + 4096, 32)])
    assert content(destination) == bytes(destination.size_bytes)


def test_slices_keep_closed_memories_mapped_and_begin_with_open_ones_only() -> None:
    source, destination = memory(b"\1"), memory(b"\0")
    mapping = destination._map
    assert mapping is not None
    move = Slices(source, destination)
    source.close()
    destination.close()
    move([(source.planes[0], destination.planes[0])], [(0, 0, 8)])
    assert mapping[:9] == b"\1" * 8 + b"\0"
    with pytest.raises(UsageError):
        Slices(source, destination)
    del move
