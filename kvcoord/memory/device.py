"""Pages in a GPU's memory: named by their addresses, and shared with another process of this host.

An engine names the tensors it keeps its pages in, once; the sidecar maps the same memory from the handle. Several
tensors may lie in one allocation, as a caching allocator makes them: a handle names whole allocations and where in them
the planes begin. It does not know how a handle travels, nor who may copy when.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Self

import msgspec

from kvcoord.errors import ConfigError, DriverCallFailed, PeerUnavailable, UsageError
from kvcoord.memory.driver import HANDLE_BYTES, Driver
from kvcoord.memory.geometry import AtLeastOne, PoolGeometry

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class DeviceHandle(msgspec.Struct, frozen=True):
    """Names the pages of one pool to another process, for as long as their owner keeps them.

    `device` is the GPU's id; `planes` say for each plane in which of the `allocations` it lies and at which offset.
    """

    device: str
    allocations: list[Handle]
    planes: list[tuple[NotNegative, NotNegative]]
    slot_stride: AtLeastOne
    geometry: PoolGeometry
    capacity: AtLeastOne


class DevicePages:
    """Pages at known addresses of one GPU. Close those that were attached; the memory of the others is their owner's.

    `planes` is where slot 0 starts in each plane: all parts of layer 0, then those of layer 1, and so on.
    Raises UsageError when there are not as many as the geometry has, or a page would reach into the next one.
    """

    __slots__ = ("_closed", "_driver", "_holds", "_opened", "capacity", "geometry", "planes", "slot_stride")

    def __init__(
        self,
        driver: Driver,
        geometry: PoolGeometry,
        capacity: int,
        planes: Sequence[int],
        slot_stride: int = 0,
        opened: Sequence[int] = (),
    ) -> None:
        self.geometry = geometry
        self.capacity = capacity
        self.planes = list(planes)
        self.slot_stride = slot_stride or geometry.plane_bytes
        self._driver = driver
        self._opened = list(opened)
        self._holds = 0
        self._closed = False
        if len(self.planes) != geometry.plane_count:
            fix = f"pool {geometry.name} has {geometry.layer_count} layers of {geometry.parts} parts: name each"
            raise UsageError("planes", len(self.planes), fix)
        if self.slot_stride < geometry.plane_bytes:
            raise UsageError("slot_stride", self.slot_stride, f"a page has {geometry.plane_bytes} bytes in each plane")

    @property
    def closed(self) -> bool:
        return self._closed

    def handle(self) -> DeviceHandle:
        """What another process needs for `attach`. Raises UsageError when closed, or for memory that has no handle."""
        if self._closed:
            raise UsageError("pages", self.geometry.name, "are closed; take handles before")
        bases: dict[int, int] = {}
        places: list[tuple[int, int]] = []
        try:
            for plane in self.planes:
                base, _ = self._driver.allocation(plane)
                places.append((bases.setdefault(base, len(bases)), plane - base))
            allocations = [self._driver.export_memory(base) for base in bases]
        except DriverCallFailed as cause:
            fix = "cannot be shared: allocate them with cudaMalloc (torch: without expandable_segments)"
            raise UsageError("pages", self.geometry.name, f"{fix}; {cause}") from cause
        return DeviceHandle(self._driver.device, allocations, places, self.slot_stride, self.geometry, self.capacity)

    def hold(self) -> "_Hold":
        """Keeps the map, also if it is closed meanwhile. Raises UsageError once it is."""
        if self._closed:
            raise UsageError("memory", self.geometry.name, "is closed; close it after its last use")
        self._holds += 1
        return _Hold(self)

    def close(self) -> None:
        """Give the map back: at once, or with the last hold. May be called again."""
        self._closed = True
        if not self._holds:
            self._unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go(self) -> None:
        self._holds -= 1
        if self._closed and not self._holds:
            self._unmap()

    def _unmap(self) -> None:
        while self._opened:
            with suppress(DriverCallFailed):  # The owner's end may have taken it away already.
                self._driver.close_memory(self._opened.pop())


class _Hold:
    __slots__ = ("_pages",)

    def __init__(self, pages: DevicePages) -> None:
        self._pages: DevicePages | None = pages

    def release(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            pages._let_go()


def attach(driver: Driver, handle: DeviceHandle) -> DevicePages:
    """Map the pages that `handle` names.

    Raises PeerUnavailable when their owner is gone, ConfigError when they are on another GPU than `driver` serves or
    the handle contradicts itself.
    """
    if handle.device != driver.device:
        raise ConfigError("handle.device", handle.device, f"this worker copies for {driver.device}: set cuda_device")
    opened: list[int] = []
    try:
        for allocation in handle.allocations:
            opened.append(driver.open_memory(allocation))
        planes = [_plane(driver, handle, opened, number, offset) for number, offset in handle.planes]
        return DevicePages(driver, handle.geometry, handle.capacity, planes, handle.slot_stride, opened)
    except DriverCallFailed as cause:
        _close_all(driver, opened)
        raise PeerUnavailable(f"pages {handle.geometry.name!r} on GPU {handle.device}", str(cause)) from cause
    except (ConfigError, UsageError):
        _close_all(driver, opened)
        raise


def _plane(driver: Driver, handle: DeviceHandle, opened: Sequence[int], number: int, offset: int) -> int:
    """Where a plane begins here; all of it lies in its allocation."""
    if number >= len(opened):
        raise ConfigError("handle.planes", number, f"only {len(opened)} allocations are named")
    _, size_bytes = driver.allocation(opened[number])
    end = offset + (handle.capacity - 1) * handle.slot_stride + handle.geometry.plane_bytes
    if end > size_bytes:
        raise ConfigError("handle.planes", offset, f"{handle.capacity} pages end at {end} of {size_bytes} bytes")
    return opened[number] + offset


def _close_all(driver: Driver, opened: Sequence[int]) -> None:
    for address in opened:
        with suppress(DriverCallFailed):
            driver.close_memory(address)
