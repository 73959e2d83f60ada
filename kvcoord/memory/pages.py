"""The bytes of one pool in one tier, layer-first: layer_count x capacity x page_bytes over one map.

It does not know who owns which slot; `memory.slots` does. All pages of one layer are neighbours, so a run of
adjacent slots is one piece of memory in each layer.
"""

import ctypes
import mmap
from contextlib import suppress
from typing import Self

from kvcoord.errors import ConfigError, UsageError
from kvcoord.memory.geometry import PoolGeometry


class PageMemory:
    """Addressable pages of one pool. Zeroed when new, not resident until touched.

    `layer_stride` is bytes from a page to the same page in the next layer, `base_address` the address of layer 0,
    slot 0. An address is good only while the map is held: by this object until `close`, or by a view.
    """

    __slots__ = ("_map", "base_address", "capacity", "geometry", "layer_stride", "size_bytes")

    def __init__(self, mapping: mmap.mmap, geometry: PoolGeometry, capacity: int) -> None:
        """Take over `mapping`, which holds at least `geometry.total_bytes(capacity)` writable bytes."""
        self.geometry = geometry
        self.capacity = capacity
        self.size_bytes = geometry.total_bytes(capacity)
        self.layer_stride = capacity * geometry.page_bytes
        self._map: mmap.mmap | None = mapping
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    @classmethod
    def anonymous(cls, geometry: PoolGeometry, capacity: int) -> Self:
        """Private memory of this process: the host tier. Raises ConfigError when it cannot be mapped."""
        size_bytes = geometry.total_bytes(capacity)
        try:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as cause:
            raise unmappable(geometry, capacity, cause) from cause
        return cls(mapping, geometry, capacity)

    @property
    def closed(self) -> bool:
        return self._map is None

    def view(self, layer: int, slot: int) -> memoryview:
        """The `page_bytes` writable bytes of one page in one layer. Keeps the map in place while it lives.

        Raises UsageError outside the pool or after `close`.
        """
        start = self._offset(layer, slot)
        with self.buffer() as whole:
            return whole[start : start + self.geometry.page_bytes]

    def address(self, layer: int, slot: int) -> int:
        """Where one page of one layer starts. Raises UsageError outside the pool or after `close`."""
        if self._map is None:
            raise self._closed()
        return self.base_address + self._offset(layer, slot)

    def buffer(self) -> memoryview:
        """All bytes. Whoever uses raw addresses holds this meanwhile: `close` then cannot unmap under them.

        Raises UsageError after `close`.
        """
        if self._map is None:
            raise self._closed()
        return memoryview(self._map)

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

    def _offset(self, layer: int, slot: int) -> int:
        if not (0 <= layer < self.geometry.layer_count and 0 <= slot < self.capacity):
            raise UsageError(
                f"{self.geometry.name}(layer, slot)",
                (layer, slot),
                f"stay below {self.geometry.layer_count} layers and {self.capacity} slots",
            )
        return layer * self.layer_stride + slot * self.geometry.page_bytes

    def _closed(self) -> UsageError:
        return UsageError("memory", self.geometry.name, "is closed; close it after its last use")


def unmappable(geometry: PoolGeometry, capacity: int, cause: Exception) -> ConfigError:
    """The error for a pool that this host cannot map: field, value and what to do."""
    size_bytes = geometry.total_bytes(capacity)
    return ConfigError(
        f"pools.{geometry.name}.capacity", capacity, f"{size_bytes} bytes cannot be mapped ({cause}); lower it"
    )
