"""The device memory of an engine: made for the group's geometry where there is no GPU, and named to the worker."""

from collections.abc import Sequence

from kvcoord.errors import UsageError
from kvcoord.memory.device import DevicePages
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedPages
from kvcoord.memory.shared_device import SharedDevice
from kvcoord.protocol.local import DeviceMemory, DevicePool, Memory, Opened, Register, Registered

Pages = Sequence[SharedPages] | SharedDevice
"""The device pages of an engine: shared memory of this host, one for each pool, or all pools on a GPU."""


def geometries_of(info: Opened) -> list[PoolGeometry]:
    """The shape of each pool that has layers on this rank, in the group's order."""
    parts = info.parts or [1] * len(info.pools)
    shapes = zip(info.pools, info.layers, info.page_bytes, info.dtypes, parts, strict=True)
    return [PoolGeometry(*shape) for shape in shapes if shape[1]]


def capacities_of(info: Opened) -> list[int]:
    """The device slots of each of these pools."""
    slots = info.device_slots or [info.device_pages] * len(info.pools)
    return [count for count, layers in zip(slots, info.layers, strict=True) if layers]


def create_pages(info: Opened) -> list[SharedPages]:
    """New zeroed memory for every pool, all or none. Raises ConfigError when the host cannot map it."""
    made: list[SharedPages] = []
    try:
        for geometry, capacity in zip(geometries_of(info), capacities_of(info), strict=True):
            made.append(SharedPages.create(geometry, capacity))
    except BaseException:
        close_pages(made)
        raise
    return made


def close_pages(pages: Sequence[SharedPages]) -> None:
    for shared in pages:
        shared.close()


def memories_of(pages: Pages) -> list[PageMemory]:
    """The memory that the engine reaches through this client; a GPU's it reaches by itself."""
    return [] if isinstance(pages, SharedDevice) else [shared.memory for shared in pages]


def adopt(pages: Pages, answer: Registered | None) -> None:
    """What the worker answered to the registration of these pages."""
    if isinstance(pages, SharedDevice):
        if answer is None:
            raise UsageError("pages", "on a GPU", "the worker copies for engines without one: set copies.engine=cuda")
        pages.adopt(answer.written, answer.layers)


def register_of(pages: Pages, info: Opened, model: str = "") -> Register:
    """The call that names this memory. Raises UsageError when it is not of the group's shape."""
    if isinstance(pages, SharedDevice):
        _check_shapes(DevicePages, [(each.geometry, each.capacity) for each in pages.pages], info)
        return Register([], model, _device_of(pages))
    _check_shapes(SharedPages, [(each.memory.geometry, each.memory.capacity) for each in pages], info)
    handles = [shared.handle() for shared in pages]
    return Register([Memory(at.geometry.name, at.pid, at.fd, at.inode, at.size_bytes) for at in handles], model)


def _check_shapes(kind: type, shapes: list[tuple[PoolGeometry, int]], info: Opened) -> None:
    geometries = geometries_of(info)
    if len(shapes) != len(geometries):
        names = [geometry.name for geometry in geometries]
        raise UsageError("pages", len(shapes), f"give one {kind.__name__} for each of the pools {names}")
    for found, geometry, capacity in zip(shapes, geometries, capacities_of(info), strict=True):
        if found != (geometry, capacity):
            raise UsageError("pages", found, f"this rank has {capacity} device pages of {geometry}")


def _device_of(pages: SharedDevice) -> DeviceMemory:
    handles = pages.handles()
    pools = [DevicePool(at.geometry.name, at.allocations, at.planes, at.slot_stride) for at in handles.pools]
    return DeviceMemory(handles.pools[0].device, pools, handles.computed)
