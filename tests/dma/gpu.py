"""A real GPU for tests, where there is one, and the reason why not, where there is none."""

from array import array
from functools import cache

from kvcoord.errors import KvcoordError
from kvcoord.memory.device import DevicePages
from kvcoord.memory.geometry import Layout, PoolGeometry
from kvcoord.memory.libcuda import LibCuda
from tests.dma.pools import CAPACITY, KV, HostPools, pattern


@cache
def driver() -> LibCuda:
    """The first GPU. Raises KvcoordError without one."""
    return LibCuda()


@cache
def missing() -> str:
    """Why tests on a GPU are skipped, empty when there is one."""
    try:
        driver()
    except KvcoordError as cause:
        return f"no GPU to test with: {cause}"
    return ""


class GpuPools(HostPools):
    """The device memory is the GPU's, filled; the host memory is this process's."""

    def __init__(
        self, geometry: PoolGeometry = KV, capacity: int = CAPACITY, host_layout: Layout = Layout.LAYER_FIRST
    ) -> None:
        super().__init__(geometry, capacity, host_layout)
        self._driver = driver()
        self._address = self._driver.allocate(geometry.total_bytes(capacity))
        plane_stride, slot_stride = geometry.strides(capacity, Layout.LAYER_FIRST)
        planes = [self._address + plane * plane_stride for plane in range(geometry.plane_count)]
        self.device = DevicePages(self._driver, geometry, capacity, planes, slot_stride)
        for layer in range(geometry.layer_count):
            for part in range(geometry.parts):
                for slot in range(capacity):
                    content = bytearray(pattern(geometry, layer, slot, part))
                    self._move(array("Q", [_address(content)]), array("Q", [self._at(layer, slot, part)]))

    @property
    def source(self) -> DevicePages:
        return self.device

    def device_page(self, layer: int, slot: int, part: int = 0) -> bytes:
        found = bytearray(self.geometry.plane_bytes)
        self._move(array("Q", [self._at(layer, slot, part)]), array("Q", [_address(found)]))
        return bytes(found)

    def close(self) -> None:
        self.device.close()
        self._driver.free(self._address)
        super().close()

    def _at(self, layer: int, slot: int, part: int) -> int:
        return self.device.planes[layer * self.geometry.parts + part] + slot * self.device.slot_stride

    def _move(self, sources: "array[int]", destinations: "array[int]") -> None:
        stream, event = self._driver.open_stream(urgent=False), self._driver.make_event(shared=False)
        self._driver.copy(stream, sources, destinations, array("Q", [self.geometry.plane_bytes]))
        self._driver.record(event, stream)
        self._driver.synchronize(event)
        self._driver.drop_event(event)
        self._driver.close_stream(stream)


def _address(content: bytearray) -> int:
    address, _ = array_of(content).buffer_info()
    return address


def array_of(content: bytearray) -> "array[int]":
    raise AssertionError
