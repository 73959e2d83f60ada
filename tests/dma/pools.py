"""Pools filled with bytes that name their page, and plans between them."""

from collections.abc import Iterable, Sequence

from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.domain import Layout
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory, Pages

LAYERS = 4
PAGE_BYTES = 96
CAPACITY = 64

KV = PoolGeometry("kv", LAYERS, PAGE_BYTES, "bfloat16")


def pattern(geometry: PoolGeometry, layer: int, slot: int, part: int = 0) -> bytes:
    """The bytes of one part of one page of one layer, unlike those of any other."""
    seed = f"{geometry.name}/{layer}/{part}/{slot}|".encode()
    return (seed * (geometry.plane_bytes // len(seed) + 1))[: geometry.plane_bytes]


class HostPools:
    """A device and a host memory of one geometry: `host` is zero. Subclasses have the device memory."""

    def __init__(self, geometry: PoolGeometry, capacity: int, host_layout: Layout = Layout.LAYER_FIRST) -> None:
        self.geometry = geometry
        self.capacity = capacity
        self.host = PageMemory.anonymous(geometry, capacity, host_layout)

    @property
    def source(self) -> Pages:
        """The device memory, as a plan takes it."""
        raise AssertionError("a subclass has it")

    def device_page(self, layer: int, slot: int, part: int = 0) -> bytes:
        """What the device holds there now."""
        raise AssertionError("a subclass reads it")

    def close(self) -> None:
        self.host.close()

    def backup(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> PoolCopy:
        return PoolCopy(self.source, self.host, device_slots, host_slots)

    def restore(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> PoolCopy:
        return PoolCopy(self.host, self.source, host_slots, device_slots)

    def plan(self, name: str, device_slots: Sequence[int], host_slots: Sequence[int] | None = None) -> CopyPlan:
        slots = device_slots if host_slots is None else host_slots
        return CopyPlan(name, Direction.DEVICE_TO_HOST, (self.backup(device_slots, slots),))

    def load(self, name: str, host_slots: Sequence[int], device_slots: Sequence[int]) -> CopyPlan:
        return CopyPlan(name, Direction.HOST_TO_DEVICE, (self.restore(host_slots, device_slots),))

    def expect_host(self, pairs: Iterable[tuple[int, int]], layers: Iterable[int] | None = None) -> None:
        """The host holds the device's pages of `pairs` in `layers` (all, unless given), and zeros elsewhere."""
        geometry = self.geometry
        copied = {host: device for device, host in pairs}
        layers_copied = set(range(geometry.layer_count) if layers is None else layers)
        empty = bytes(geometry.plane_bytes)
        for layer in range(geometry.layer_count):
            for part in range(geometry.parts):
                for slot in range(self.capacity):
                    there = layer in layers_copied and slot in copied
                    expected = pattern(geometry, layer, copied[slot], part) if there else empty
                    found = bytes(self.host.view(layer, slot, part))
                    assert found == expected, f"layer {layer}, part {part}, slot {slot}"


class Pools(HostPools):
    """Both memories are this process's; `device` is filled."""

    def __init__(
        self,
        geometry: PoolGeometry = KV,
        capacity: int = CAPACITY,
        device_layout: Layout = Layout.LAYER_FIRST,
        host_layout: Layout = Layout.LAYER_FIRST,
    ) -> None:
        super().__init__(geometry, capacity, host_layout)
        self.device = PageMemory.anonymous(geometry, capacity, device_layout)
        for layer in range(geometry.layer_count):
            for part in range(geometry.parts):
                for slot in range(capacity):
                    self.device.view(layer, slot, part)[:] = pattern(geometry, layer, slot, part)

    @property
    def source(self) -> PageMemory:
        return self.device

    def device_page(self, layer: int, slot: int, part: int = 0) -> bytes:
        return bytes(self.device.view(layer, slot, part))

    def close(self) -> None:
        self.device.close()
        super().close()
