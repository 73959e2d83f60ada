"""The bytes of one pool in one tier: what a copy needs to know of them, and pages in memory of this process.

Whatever the layout, and also where an engine keeps a tensor for every layer, a piece of a page is found from the
address of its plane and the stride from page to page. It does not know who owns which slot; `memory.slots` does.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, Self

from kvcoord.domain import Layout
from kvcoord.errors import ConfigError, UsageError
from kvcoord.memory.geometry import PoolGeometry


class Hold(Protocol):
    """Keeps addresses good until it is released."""

    def release(self) -> None: ...


class Pages(Protocol):
    """Pages that a copy engine can read and write: of this process, of a GPU, or shared with another process."""

    @property
    def geometry(self) -> PoolGeometry: ...

    @property
    def capacity(self) -> int:
        """Slots."""
        ...

    @property
    def planes(self) -> Sequence[int]:
        """Where slot 0 starts in each plane: the parts of layer 0, then those of layer 1, and so on."""
        ...

    @property
    def slot_stride(self) -> int:
        """Bytes from one page's piece to the next page's piece, in every plane."""
        ...

    def hold(self) -> Hold:
        """Keeps the pages where they are, also if they are closed meanwhile. Raises UsageError once they are closed."""
        ...


class PageMemory:
    """Addressable pages over one map. Zeroed when new, not resident until touched.

    `plane_stride` is bytes from a page's piece in one plane to its piece in the next, `layer_stride` the same from
    layer to layer, `base_address` where slot 0 starts in the first plane. An address is good only while the map is
    held: by this object until `close`, or by a view.
    """

    __slots__ = (
        "_map",
        "base_address",
        "capacity",
        "geometry",
        "layer_stride",
        "layout",
        "plane_stride",
        "planes",
        "size_bytes",
        "slot_stride",
    )

    def __init__(
        self, mapping: mmap.mmap, geometry: PoolGeometry, capacity: int, layout: Layout = Layout.LAYER_FIRST
    ) -> None:
        """Take over `mapping`, which holds at least `geometry.total_bytes(capacity)` writable bytes."""
        self.geometry = geometry
        self.capacity = capacity
        self.layout = layout
        self.size_bytes = geometry.total_bytes(capacity)
        self.plane_stride, self.slot_stride = geometry.strides(capacity, layout)
        self.layer_stride = self.plane_stride * geometry.parts
        self._map: mmap.mmap | None = mapping
        # Scattered pages are copied a fifth faster when the processor finds them through large pages of the system.
        with suppress(OSError):  # A kernel without them. Shared maps have them where shmem_enabled is `advise`.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.planes = [self.base_address + plane * self.plane_stride for plane in range(geometry.plane_count)]

    @classmethod
    def anonymous(cls, geometry: PoolGeometry, capacity: int, layout: Layout = Layout.LAYER_FIRST) -> Self:
        """Private memory of this process: the host tier. Raises ConfigError when it cannot be mapped."""
        size_bytes = geometry.total_bytes(capacity)
        try:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as cause:
            raise unmappable(geometry, capacity, cause) from cause
        return cls(mapping, geometry, capacity, layout)

    @property
    def closed(self) -> bool:
        return self._map is None

    def view(self, layer: int, slot: int, part: int = 0) -> memoryview:
        """The `plane_bytes` writable bytes of one part of one page in one layer. Keeps the map while it lives.

        Raises UsageError outside the pool or after `close`.
        """
        start = self._offset(layer, slot, part)
        with self.buffer() as whole:
            return whole[start : start + self.geometry.plane_bytes]

    def address(self, layer: int, slot: int, part: int = 0) -> int:
        """Where one part of one page of one layer starts. Raises UsageError outside the pool or after `close`."""
        if self._map is None:
            raise self._closed()
        return self.base_address + self._offset(layer, slot, part)

    def buffer(self) -> memoryview:
        """All bytes. Whoever uses raw addresses holds this meanwhile: `close` then cannot unmap under them.

        Raises UsageError after `close`.
        """
        if self._map is None:
            raise self._closed()
        return memoryview(self._map)

    def hold(self) -> memoryview:
        """As `buffer`: the view is the hold."""
        return self.buffer()

    def close(self) -> None:
        """Give the map back: at once, or when the last view of it ends. May be called again."""
        mapping, self._map = self._map, None
        if mapping is not None:
            with suppress(BufferError):  # Views are out; the map ends with the last of them.
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _offset(self, layer: int, slot: int, part: int) -> int:
        geometry = self.geometry
        if not (0 <= layer < geometry.layer_count and 0 <= slot < self.capacity and 0 <= part < geometry.parts):
            raise UsageError(
                f"{geometry.name}(layer, slot, part)",
                (layer, slot, part),
                f"stay below {geometry.layer_count} layers, {self.capacity} slots and {geometry.parts} parts",
            )
        return (layer * geometry.parts + part) * self.plane_stride + slot * self.slot_stride

    def _closed(self) -> UsageError:
        return UsageError("memory", self.geometry.name, "is closed; close it after its last use")


def unmappable(geometry: PoolGeometry, capacity: int, cause: Exception) -> ConfigError:
    """The error for a pool that this host cannot map: field, value, the system's code, the limits and what to do."""
    host_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    fix = (
        f"{geometry.total_bytes(capacity)} bytes cannot be mapped ({cause}); RLIMIT_AS is"
        f" {limit_of(resource.RLIMIT_AS)}, the host has {host_bytes} bytes of memory; lower it"
    )
    return ConfigError(f"pools.{geometry.name}.capacity", capacity, fix)


def limit_of(limit: int) -> str:
    """One of the `resource.RLIMIT_`s of this process, as people read it."""
    size_bytes, _ = resource.getrlimit(limit)
    return "unlimited" if size_bytes == resource.RLIM_INFINITY else f"{size_bytes} bytes"
