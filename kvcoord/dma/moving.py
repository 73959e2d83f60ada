"""Moves pieces of planes from one memory of this process to another, in the two ways that Python has.

Both were measured beside others on 64 MiB of scattered pieces of 16 KiB, more than a core's own caches hold, as a share
of one memcpy's rate by processor time: slices 0.78 to 0.83, calls 0.72 to 0.75, a loop in C over the same addresses
0.95. What is missing is the interpreter between two pieces, whose own data the last piece has driven out of the caches.
`process_vm_readv`, one call for 1,024 pieces, reached 0.6 to 0.7, since the kernel looks up each 4 KiB of both sides.
Pieces in the order of their addresses, and calls by way of `map`, made no difference. It does not know plans, layers or
threads.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, c_size_t, c_void_p
from typing import Final

from kvcoord.dma.pieces import Piece, PlanePair
from kvcoord.memory.pages import PageMemory

Move = Callable[[Sequence[PlanePair], Sequence[Piece]], None]
"""Moves the same pieces in each of some planes, given from the planes' addresses on."""

_memmove: Final = CDLL(None)["memmove"]
"""Apart from `ctypes.memmove`: without a result to turn into a number, which costs a sixth of the call."""
_memmove.argtypes = (c_void_p, c_void_p, c_size_t)
_memmove.restype = None


class Slices:
    """Moves pieces between two memories, and keeps the interpreter to itself until all of them are moved.

    It costs a third of a call for each piece, so it is for copies that are over before another thread minds. The
    memories stay mapped while it lives. Raises UsageError for a closed one, ValueError for a piece over an end.
    """

    __slots__ = ("_destination", "_destination_address", "_source", "_source_address")

    def __init__(self, source: PageMemory, destination: PageMemory) -> None:
        self._source, self._source_address = source.buffer(), source.base_address
        self._destination, self._destination_address = destination.buffer(), destination.base_address

    def __call__(self, planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        source, destination = self._source, self._destination
        for from_plane, to_plane in planes:
            from_start, to_start = from_plane - self._source_address, to_plane - self._destination_address
            for source_offset, destination_offset, size_bytes in pieces:
                here, there = from_start + source_offset, to_start + destination_offset
                destination[there : there + size_bytes] = source[here : here + size_bytes]


def move_calls(planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
    """Moves pieces while other threads run Python.

    With slices the loop's thread would wait for the interpreter's switch interval, 5 ms, whenever it wakes up.
    """
    move = _memmove
    for source, destination in planes:
        for source_offset, destination_offset, size_bytes in pieces:
            move(destination + destination_offset, source + source_offset, size_bytes)
