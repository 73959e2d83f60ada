"""Pools filled with bytes that name their page, and plans between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory

LAYERS = 4
PAGE_BYTES = 96
CAPACITY = 64


def pattern(geometry: PoolGeometry, layer: int, slot: int) -> bytes:
    """The bytes of one page of one layer, unlike those of any other."""
    seed = f"{geometry.name}/{layer}/{slot}|".encode()
    return (seed * (geometry.page_bytes // len(seed) + 1))[: geometry.page_bytes]


@dataclass
class Pools:
    """A device and a host memory of one geometry; `device` is filled, `host` is zero."""

    geometry: PoolGeometry = field(default_factory=lambda: PoolGeometry("kv", LAYERS, PAGE_BYTES, "bfloat16"))
    capacity: int = CAPACITY
    device: PageMemory = field(init=False)
    host: PageMemory = field(init=False)

    def __post_init__(self) -> None:
        self.device = PageMemory.anonymous(self.geometry, self.capacity)
        self.host = PageMemory.anonymous(self.geometry, self.capacity)
        for layer in range(self.geometry.layer_count):
            for slot in range(self.capacity):
                self.device.view(layer, slot)[:] = pattern(self.geometry, layer, slot)

    def backup(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> PoolCopy:
        return PoolCopy(self.device, self.host, device_slots, host_slots)

    def plan(self, name: str, device_slots: Sequence[int], host_slots: Sequence[int] | None = None) -> CopyPlan:
        slots = device_slots if host_slots is None else host_slots
        return CopyPlan(name, Direction.DEVICE_TO_HOST, (self.backup(device_slots, slots),))

    def expect_host(self, pairs: Iterable[tuple[int, int]], layers: Iterable[int] | None = None) -> None:
        """The host holds the device's pages of `pairs` in `layers` (all, unless given), and zeros elsewhere."""
        copied = {host: device for device, host in pairs}
        layers_copied = set(range(self.geometry.layer_count) if layers is None else layers)
        empty = bytes(self.geometry.page_bytes)
        for layer in range(self.geometry.layer_count):
            for slot in range(self.capacity):
                there = layer in layers_copied and slot in copied
                expected = pattern(self.geometry, layer, copied[slot]) if there else empty
                assert bytes(self.host.view(layer, slot)) == expected, f"layer {layer}, slot {slot}"
