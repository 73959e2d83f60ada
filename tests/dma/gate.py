"""A memmove that says who moves and when."""

import threading
from ctypes import memmove


class Gate:
    """Stands in for memmove: notes who moves, and lets a thread other than the test's move only so many pieces."""

    def __init__(self, pieces_free: int) -> None:
        self._test_thread = threading.get_ident()
        self._free = threading.Semaphore(pieces_free)
        self.movers: list[int] = []
        self.moved = threading.Semaphore(0)

    def __call__(self, destination: int, source: int, size_bytes: int) -> None:
        if threading.get_ident() != self._test_thread:
            self._free.acquire()
        self.movers.append(threading.get_ident())
        memmove(destination, source, size_bytes)
        self.moved.release()

    def let(self, pieces: int) -> None:
        self._free.release(pieces)

    def wait_moved(self, pieces: int) -> None:
        for _ in range(pieces):
            assert self.moved.acquire(timeout=30)
