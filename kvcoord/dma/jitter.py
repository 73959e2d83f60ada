"""A canary for missing waits: a driver whose streams and threads lose time after every event, at random.

Work that is ordered by luck, and not by an event, changes its order sooner or later when timing is perturbed; with
checksums or known bytes that shows. It wraps any driver and keeps every order that was asked for. Never in production.
"""

import time
from array import array
from random import Random

from kvcoord.memory.driver import Addresses, Driver, Event, Stream
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.pinned import Pinned


class JitteryDriver:
    """A `Driver` in front of another.

    After each record and each wait a stream copies up to `bytes_max` bytes to no purpose, and a thread that has waited
    sleeps up to `delay_s`. Close it after its streams, before the driver within.
    """

    def __init__(self, driver: Driver, bytes_max: int, delay_s: float, seed: int) -> None:
        self._driver = driver
        self._bytes_max = bytes_max
        self._delay_s = delay_s
        self._random = Random(seed)
        self._scratch = PageMemory.anonymous(PoolGeometry("jitter", 1, bytes_max, "uint8"), 1)
        self._pinned = Pinned(driver, self._scratch)
        self._on_device = driver.allocate(bytes_max)

    def close(self) -> None:
        self._driver.free(self._on_device)
        self._pinned.unpin()
        self._scratch.close()

    @property
    def device(self) -> str:
        return self._driver.device

    @property
    def pci_bus_id(self) -> str:
        return self._driver.pci_bus_id

    def open_stream(self, *, urgent: bool) -> Stream:
        return self._driver.open_stream(urgent=urgent)

    def close_stream(self, stream: Stream) -> None:
        self._driver.close_stream(stream)

    def make_event(self, *, shared: bool) -> Event:
        return self._driver.make_event(shared=shared)

    def drop_event(self, event: Event) -> None:
        self._driver.drop_event(event)

    def record(self, event: Event, stream: Stream) -> None:
        self._driver.record(event, stream)
        self._lose_time(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._driver.wait(stream, event)
        self._lose_time(stream)

    def synchronize(self, event: Event) -> None:
        self._driver.synchronize(event)
        time.sleep(self._random.random() * self._delay_s)

    def elapsed_s(self, first: Event, last: Event) -> float:
        return self._driver.elapsed_s(first, last)

    def copy(self, stream: Stream, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        self._driver.copy(stream, sources, destinations, sizes)

    def allocate(self, size_bytes: int) -> int:
        return self._driver.allocate(size_bytes)

    def free(self, address: int) -> None:
        self._driver.free(address)

    def register_host(self, address: int, size_bytes: int) -> None:
        self._driver.register_host(address, size_bytes)

    def unregister_host(self, address: int) -> None:
        self._driver.unregister_host(address)

    def allocation(self, address: int) -> tuple[int, int]:
        return self._driver.allocation(address)

    def export_memory(self, base_address: int) -> bytes:
        return self._driver.export_memory(base_address)

    def open_memory(self, handle: bytes) -> int:
        return self._driver.open_memory(handle)

    def close_memory(self, base_address: int) -> None:
        self._driver.close_memory(base_address)

    def export_event(self, event: Event) -> bytes:
        return self._driver.export_event(event)

    def open_event(self, handle: bytes) -> Event:
        return self._driver.open_event(handle)

    def _lose_time(self, stream: Stream) -> None:
        size_bytes = self._random.randint(1, self._bytes_max)
        one = array("Q", [self._on_device]), array("Q", [self._scratch.base_address]), array("Q", [size_bytes])
        self._driver.copy(stream, *one)
