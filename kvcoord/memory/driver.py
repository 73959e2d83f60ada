"""The seam to a GPU's driver: the few calls that copies and sharing need, and nothing else of it.

Everything that orders work on the GPU goes through here, so that a recording stand-in can show which waits are there
and which are missing. `memory.libcuda` is the real one. It does not know pages, plans or operations.

Terms: a *stream* is a queue of the GPU; its work goes on in order, and unordered against other streams. An *event* is a
mark that is recorded on a stream; whoever waits for it waits for its last record made before that wait. A wait for an
event that was never recorded is no wait.
"""

from array import array
from typing import Final, NewType, Protocol, TypeAlias

Stream = NewType("Stream", int)
Event = NewType("Event", int)

Addresses: TypeAlias = "array[int]"
"""An array of unsigned 64-bit numbers, typecode Q: addresses or sizes, one for each piece of a copy."""

HANDLE_BYTES: Final = 64
"""Length of a handle that names memory or an event to another process."""


class Driver(Protocol):
    """One GPU, as this process sees it. Every call may raise DriverCallFailed. Safe to call from several threads."""

    @property
    def device(self) -> str:
        """The GPU's own id: the same in every process, whatever numbers they give it."""
        ...

    @property
    def pci_bus_id(self) -> str:
        """Where the GPU is on this host's bus, as in `0000:3b:00.0`."""
        ...

    def open_stream(self, *, urgent: bool) -> Stream:
        """A stream that is not ordered against the default stream. `urgent`: of the highest priority."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """What was put on it still goes on to its end."""
        ...

    def make_event(self, *, shared: bool) -> Event:
        """An event whose `synchronize` parks the thread. `shared`: can be named to other processes, has no time."""
        ...

    def drop_event(self, event: Event) -> None: ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark what the stream was given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on begins after the event's last record. The calling thread goes on."""
        ...

    def synchronize(self, event: Event) -> None:
        """Park the calling thread until the event's last record has been reached. Uses no processor meanwhile."""
        ...

    def elapsed_s(self, first: Event, last: Event) -> float:
        """Seconds between two reached records, by the GPU's clock."""
        ...

    def copy(self, stream: Stream, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        """Put copies on the stream, in one call where the driver can. Their order among each other is open.

        An address is one of the GPU or one of this process. Memory of this process should be registered.
        """
        ...

    def allocate(self, size_bytes: int) -> int:
        """Memory of the GPU. Returns its address."""
        ...

    def free(self, address: int) -> None: ...

    def register_host(self, address: int, size_bytes: int) -> None:
        """Lock memory of this process in place, so that the GPU reaches it by itself."""
        ...

    def unregister_host(self, address: int) -> None: ...

    def allocation(self, address: int) -> tuple[int, int]:
        """Base address and size of the allocation on the GPU that this address lies in."""
        ...

    def export_memory(self, base_address: int) -> bytes:
        """The handle of an allocation, for `open_memory` in another process."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation. Returns its base address here."""
        ...

    def close_memory(self, base_address: int) -> None: ...

    def export_event(self, event: Event) -> bytes:
        """The handle of a shared event, for `open_event` in another process."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Another process's event. `drop_event` ends it here, and only here."""
        ...
