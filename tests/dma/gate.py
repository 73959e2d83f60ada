"""Stand-ins for what moves the CPU engine's pieces: one says who moves and when, any can be put in its place."""

import threading
from collections.abc import Sequence

import pytest

from kvcoord.dma import cpu
from kvcoord.dma.moving import Move, move_calls
from kvcoord.dma.pieces import Piece, PlanePair


def stand_in(monkeypatch: pytest.MonkeyPatch, move: Move) -> None:
    """Has `move` called on the loop's thread and on all others, once for each layer of each pool."""
    monkeypatch.setattr(cpu, "move_calls", move)
    monkeypatch.setattr(cpu, "Slices", lambda source, destination: move)


class Gate:
    """Notes who moves, piece by piece, and lets a thread other than the test's move only so many pieces."""

    def __init__(self, pieces_free: int) -> None:
        self._test_thread = threading.get_ident()
        self._free = threading.Semaphore(pieces_free)
        self.movers: list[int] = []
        self.moved = threading.Semaphore(0)

    def __call__(self, planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        for plane in planes:
            for piece in pieces:
                if threading.get_ident() != self._test_thread:
                    self._free.acquire()
                self.movers.append(threading.get_ident())
                move_calls([plane], [piece])
                self.moved.release()

    def let(self, pieces: int) -> None:
        self._free.release(pieces)

    def wait_moved(self, pieces: int) -> None:
        for _ in range(pieces):
            assert self.moved.acquire(timeout=30)
