"""The device memory of an engine without a GPU: made for the group's geometry, and named to the worker."""

from collections.abc import Sequence

from kvcoord.errors import UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.shared import SharedPages
from kvcoord.protocol.local import Memory, Opened, Register


def geometries_of(info: Opened) -> list[PoolGeometry]:
    """The shape of each pool, in the group's order."""
    shapes = zip(info.pools, info.layers, info.page_bytes, info.dtypes, strict=True)
    return [PoolGeometry(*shape) for shape in shapes]


def create_pages(info: Opened) -> list[SharedPages]:
    """New zeroed memory for every pool, all or none. Raises ConfigError when the host cannot map it."""
    made: list[SharedPages] = []
    try:
        for geometry in geometries_of(info):
            made.append(SharedPages.create(geometry, info.device_pages))
    except BaseException:
        close_pages(made)
        raise
    return made


def close_pages(pages: Sequence[SharedPages]) -> None:
    for shared in pages:
        shared.close()


def register_of(pages: Sequence[SharedPages], info: Opened) -> Register:
    """The call that names this memory. Raises UsageError when it is not of the group's shape."""
    geometries = geometries_of(info)
    if len(pages) != len(geometries):
        names = [geometry.name for geometry in geometries]
        raise UsageError("pages", len(pages), f"give one SharedPages for each of the pools {names}")
    for shared, geometry in zip(pages, geometries, strict=True):
        found = (shared.memory.geometry, shared.memory.capacity)
        if found != (geometry, info.device_pages):
            raise UsageError("pages", found, f"this rank has {info.device_pages} device pages of {geometry}")
    handles = [shared.handle() for shared in pages]
    return Register([Memory(at.geometry.name, at.pid, at.fd, at.inode, at.size_bytes) for at in handles])
