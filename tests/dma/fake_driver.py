"""A GPU's driver without a GPU: streams that do real copies in this process's memory, late and in any allowed order.

Nothing is done when it is asked for. Only when somebody synchronizes with an event is work taken off the streams, one
piece at a time from a stream chosen at random, until the event's record is reached; work that nobody waits for is left
undone. So what is ordered by a wait is done in that order, and what is not, in any. Every call is written down.
"""

import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, memmove
from dataclasses import dataclass, field

from kvcoord.errors import DriverCallFailed
from kvcoord.memory.driver import HANDLE_BYTES, Addresses, Event, Stream

Range = tuple[int, int]
"""Address and size in bytes."""


@dataclass(eq=False)
class Work:
    """One thing on a stream. `what` is copy, record, wait or kernel; `marked` is the record that a wait waits for."""

    what: str
    stream: Stream
    event: Event | None = None
    marked: "Work | None" = None
    reads: Sequence[Range] = ()
    writes: Sequence[Range] = ()
    act: Callable[[], None] | None = None
    done: bool = False


@dataclass(eq=False)
class Seen:
    """A thread has learned that a record was reached: what the host does later comes after it."""

    marked: Work


@dataclass(eq=False)
class HostAccess:
    """The host itself touches memory."""

    reads: Sequence[Range] = ()
    writes: Sequence[Range] = ()


Entry = Work | Seen | HostAccess


@dataclass
class FakeDriver:
    """`device` is its id. `calls_failing` names calls that fail: by name, the numbers of those from 0 on that do."""

    seed: int = 0
    device: str = "fake-gpu"
    pci_bus_id: str = "0000:00:1e.0"
    calls_failing: dict[str, set[int]] = field(default_factory=dict)
    waits_ignored: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.log: list[Entry] = []
        self.registered: dict[int, int] = {}
        self.opened: list[int] = []
        self.batches: list[int] = []
        self.streams: dict[Stream, deque[Work]] = {}
        self.urgent: dict[Stream, bool] = {}
        self.events: set[Event] = set()
        self.seen_by: set[int] = set()
        self._counts: dict[str, int] = {}
        self._random = random.Random(self.seed)
        self._records: dict[Event, Work] = {}
        self._originals: dict[Event, Event] = {}
        self._names = iter(range(1, 1 << 31))
        self._lock = threading.RLock()
        self._permits: threading.Semaphore | None = None
        self._memory: dict[int, mmap.mmap] = {}

    # --- what a test does -----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on the GPU reaches only as many records as it is let."""
        self._permits = threading.Semaphore(0)

    def let(self, records: int = 1) -> None:
        assert self._permits is not None
        self._permits.release(records)

    def kernel(
        self,
        stream: Stream,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        act: Callable[[], None] | None = None,
    ) -> None:
        """The engine's own work on a stream of its."""
        self._put(Work("kernel", stream, reads=reads, writes=writes, act=act))

    def host(self, reads: Sequence[Range] = (), writes: Sequence[Range] = ()) -> None:
        self.log.append(HostAccess(reads, writes))

    def finish(self, stream: Stream) -> None:
        """All that is on the stream is done, and whatever that waits for."""
        event = self.make_event(shared=False)
        self.record(event, stream)
        self._reach(self._records[event])
        self.drop_event(event)

    # --- the seam -------------------------------------------------------------------------------------------------

    def open_stream(self, *, urgent: bool) -> Stream:
        stream = Stream(next(self._names))
        self.streams[stream] = deque()
        self.urgent[stream] = urgent
        return stream

    def close_stream(self, stream: Stream) -> None:
        del self.streams[stream]

    def make_event(self, *, shared: bool) -> Event:
        self._call("make_event")
        event = Event(next(self._names))
        self.events.add(event)
        return event

    def drop_event(self, event: Event) -> None:
        self.events.remove(event)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("record")
        assert event in self.events
        work = Work("record", stream, event)
        self._put(work)
        self._records[self._originals.get(event, event)] = work

    def wait(self, stream: Stream, event: Event) -> None:
        number = self._call("wait")
        marked = self._records.get(self._originals.get(event, event))
        if number not in self.waits_ignored:
            self._put(Work("wait", stream, event, marked))

    def synchronize(self, event: Event) -> None:
        self._call("synchronize")
        if self._permits is not None:
            assert self._permits.acquire(timeout=30)
        self.seen_by.add(threading.get_ident())
        marked = self._records.get(event)
        if marked is not None:
            self._reach(marked)
            with self._lock:
                self.log.append(Seen(marked))

    def elapsed_s(self, first: Event, last: Event) -> float:
        if not (self._records[first].done and self._records[last].done):
            raise DriverCallFailed("elapsed_s", 600, "not reached")
        return 0.001

    def copy(self, stream: Stream, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        self._call("copy")
        pieces = list(zip(sources, destinations, sizes, strict=True))
        assert pieces
        for inside in (sources, destinations):
            assert all(self._in_one_chunk(address, size) for address, size in zip(inside, sizes, strict=True))
        self.batches.append(len(pieces))

        def move() -> None:
            for source, destination, size_bytes in pieces:
                memmove(destination, source, size_bytes)

        reads = [(source, size_bytes) for source, _, size_bytes in pieces]
        writes = [(destination, size_bytes) for _, destination, size_bytes in pieces]
        self._put(Work("copy", stream, reads=reads, writes=writes, act=move))

    def allocate(self, size_bytes: int) -> int:
        memory = mmap.mmap(-1, size_bytes)
        address = addressof(c_char.from_buffer(memory))
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        self._memory.pop(address).close()

    def register_host(self, address: int, size_bytes: int) -> None:
        self._call("register_host")
        self.registered[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]

    def allocation(self, address: int) -> tuple[int, int]:
        for base, memory in self._memory.items():
            if base <= address < base + len(memory):
                return base, len(memory)
        raise DriverCallFailed("allocation", 1, "no such address")

    def export_memory(self, base_address: int) -> bytes:
        self._call("export_memory")
        assert base_address in self._memory
        return base_address.to_bytes(HANDLE_BYTES, "little")

    def open_memory(self, handle: bytes) -> int:
        self._call("open_memory")
        address = int.from_bytes(handle, "little")
        if address not in self._memory:
            raise DriverCallFailed("open_memory", 201, "the owner is gone")
        self.opened.append(address)
        return address

    def close_memory(self, base_address: int) -> None:
        self.opened.remove(base_address)

    def export_event(self, event: Event) -> bytes:
        return event.to_bytes(HANDLE_BYTES, "little")

    def open_event(self, handle: bytes) -> Event:
        original = Event(int.from_bytes(handle, "little"))
        if original not in self.events:
            raise DriverCallFailed("open_event", 201, "the owner is gone")
        event = self.make_event(shared=True)
        self._originals[event] = original
        return event

    # --- the GPU --------------------------------------------------------------------------------------------------

    def _put(self, work: Work) -> None:
        with self._lock:
            self.streams[work.stream].append(work)
            self.log.append(work)

    def _reach(self, marked: Work) -> None:
        with self._lock:
            while not marked.done:
                ready = [queue for queue in self.streams.values() if queue and _free(queue[0])]
                work = self._random.choice(ready).popleft()
                if work.act is not None:
                    work.act()
                work.done = True

    def _call(self, name: str) -> int:
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        if number in self.calls_failing.get(name, ()):
            raise DriverCallFailed(name, 719, "injected")
        return number

    def _in_one_chunk(self, address: int, size_bytes: int) -> bool:
        """A driver refuses a piece that begins in one registered chunk and ends in another."""
        inside = [
            (start, length)
            for start, length in self.registered.items()
            if start < address + size_bytes and address < start + length
        ]
        return not inside or (len(inside) == 1 and address + size_bytes <= inside[0][0] + inside[0][1])


def _free(work: Work) -> bool:
    return work.what != "wait" or work.marked is None or work.marked.done
