"""Locks host memory in place for a GPU, in chunks, all of them or none.

A chunk at a time keeps the driver's lock short and shows how far it got. A copy must not reach over the border of two
chunks, since to the driver they are two memories; `cut` divides what does. It does not know what the memory holds.
"""

import mmap
import resource
from array import array
from contextlib import suppress
from typing import Final

from kvcoord.errors import ConfigError, DriverCallFailed
from kvcoord.memory.driver import Addresses, Driver
from kvcoord.memory.pages import PageMemory, limit_of

CHUNK_BYTES: Final = 4 << 30


class Pinned:
    """The locked chunks of one memory. Holds its map until `unpin`."""

    __slots__ = ("_chunks", "_driver", "_hold", "base_address", "chunk_bytes")

    def __init__(self, driver: Driver, memory: PageMemory, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Locks all of it. Raises ConfigError with the driver's code, the size and the limits; nothing is locked then.

        `chunk_bytes` is rounded up to whole pages of the system.
        """
        self._driver = driver
        self.base_address = memory.base_address
        self.chunk_bytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._chunks: list[int] = []
        self._hold = memory.hold()
        end = memory.base_address + memory.size_bytes
        try:
            for start in range(memory.base_address, end, self.chunk_bytes):
                driver.register_host(start, min(self.chunk_bytes, end - start))
                self._chunks.append(start)
        except DriverCallFailed as cause:
            done_bytes = len(self._chunks) * self.chunk_bytes
            self.unpin()
            raise _unpinnable(memory, done_bytes, cause) from cause

    @property
    def chunk_count(self) -> int:
        return len(self._chunks)

    def unpin(self) -> None:
        """Unlocks what is locked, the last chunk first, and lets the map go. May be called again."""
        while self._chunks:
            with suppress(DriverCallFailed):  # A driver that is broken has let everything go already.
                self._driver.unregister_host(self._chunks[-1])
            self._chunks.pop()
        self._hold.release()

    def cut(self, inside: Addresses, other: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
        """The same pieces with none over a border. `inside` are their addresses in this memory."""
        if len(self._chunks) < 2:
            return inside, other, sizes
        here, there, lengths = array("Q"), array("Q"), array("Q")
        base, chunk_bytes = self.base_address, self.chunk_bytes
        for address, far, size_bytes in zip(inside, other, sizes, strict=True):
            while size_bytes:
                part_bytes = min(size_bytes, chunk_bytes - (address - base) % chunk_bytes)
                here.append(address)
                there.append(far)
                lengths.append(part_bytes)
                address, far, size_bytes = address + part_bytes, far + part_bytes, size_bytes - part_bytes
        return here, there, lengths


def _unpinnable(memory: PageMemory, done_bytes: int, cause: DriverCallFailed) -> ConfigError:
    fix = (
        f"{memory.size_bytes} bytes of host memory cannot be locked, {done_bytes} could: {cause};"
        f" RLIMIT_MEMLOCK is {limit_of(resource.RLIMIT_MEMLOCK)};"
        " lower host_pages, or raise that limit or the container's memory"
    )
    return ConfigError(f"pools.{memory.geometry.name}.capacity", memory.capacity, fix)
