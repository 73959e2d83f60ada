"""The device memory of the engine that is registered with a worker: shared memory of this host, or a GPU's.

It does not know when pages are copied.
"""

from collections.abc import Callable, Sequence

from kvcoord.errors import DriverCallFailed, PeerUnavailable, UsageError
from kvcoord.memory import device, shared
from kvcoord.memory.device import DeviceHandle, DevicePages
from kvcoord.memory.driver import Driver, Event
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory, Pages
from kvcoord.memory.shared import SharedHandle
from kvcoord.protocol.local import DeviceMemory, Register


class EngineMemory:
    """Pages of each pool, in the group's order, and on a GPU the event that the engine records before it asks."""

    def __init__(
        self, pages: Sequence[PageMemory | DevicePages], computed: Event | None, drop: Callable[[], None]
    ) -> None:
        self.pages: list[Pages] = list(pages)
        self.computed = computed
        self._closing = list(pages)
        self._drop = drop

    def close(self) -> None:
        """Unmaps it. Copies under way keep it mapped until they are over."""
        for pages in self._closing:
            pages.close()
        self._drop()


def map_memory(
    call: Register, geometries: Sequence[PoolGeometry], capacities: Sequence[int], driver: Driver | None
) -> EngineMemory:
    """Maps what an engine registers, so many slots of each pool: all of it or nothing.

    Raises UsageError when it is not what this worker is made for, ConfigError when it is not what its handle says,
    PeerUnavailable when the engine is gone.
    """
    if driver is None and call.device is not None:
        raise UsageError("device", call.device.device, "this worker copies without a GPU: set copies.engine=cuda")
    if driver is not None and call.device is None:
        raise UsageError("memory", len(call.memory), "this worker copies with a GPU: register memory that is on it")
    named = [at.pool for at in (call.memory if call.device is None else call.device.pools)]
    expected = [geometry.name for geometry in geometries]
    if named != expected:
        raise UsageError("memory.pool", named, f"register one memory for each of the pools {expected}, in this order")
    if driver is not None and call.device is not None:
        return _map_device(driver, call.device, geometries, capacities)
    mapped: list[PageMemory] = []
    try:
        for at, geometry, capacity in zip(call.memory, geometries, capacities, strict=True):
            mapped.append(shared.attach(SharedHandle(at.pid, at.fd, at.inode, at.size_bytes, geometry, capacity)))
    except BaseException:
        for pages in mapped:
            pages.close()
        raise
    return EngineMemory(mapped, None, _nothing)


def _map_device(
    driver: Driver, memory: DeviceMemory, geometries: Sequence[PoolGeometry], capacities: Sequence[int]
) -> EngineMemory:
    mapped: list[DevicePages] = []
    try:
        for pool, geometry, capacity in zip(memory.pools, geometries, capacities, strict=True):
            handle = DeviceHandle(memory.device, pool.allocations, pool.planes, pool.slot_stride, geometry, capacity)
            mapped.append(device.attach(driver, handle))
        computed = _open_event(driver, memory)
    except BaseException:
        for pages in mapped:
            pages.close()
        raise
    return EngineMemory(mapped, computed, lambda: driver.drop_event(computed))


def _open_event(driver: Driver, memory: DeviceMemory) -> Event:
    try:
        return driver.open_event(memory.computed)
    except DriverCallFailed as cause:
        raise PeerUnavailable(f"the engine's event on GPU {memory.device}", str(cause)) from cause


def _nothing() -> None:
    """Shared memory has no event."""
