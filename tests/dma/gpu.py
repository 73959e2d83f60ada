"""A real GPU for tests, where there is one, and the reason why not, where there is none."""

from array import array
from ctypes import addressof, create_string_buffer
from functools import cache

from kvcoord.domain import Layout
from kvcoord.errors import KvcoordError
from kvcoord.memory.device import DevicePages
from kvcoord.memory.geometry import PoolGeometry
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
                    content = create_string_buffer(pattern(geometry, layer, slot, part), geometry.plane_bytes)
                    self._move(addressof(content), self._at(layer, slot, part))

    @property
    def source(self) -> DevicePages:
        return self.device

    def device_page(self, layer: int, slot: int, part: int = 0) -> bytes:
        found = create_string_buffer(self.geometry.plane_bytes)
        self._move(self._at(layer, slot, part), addressof(found))
        return found.raw

    def close(self) -> None:
        self.device.close()
        self._driver.free(self._address)
        super().close()

    def _at(self, layer: int, slot: int, part: int) -> int:
        return self.device.planes[layer * self.geometry.parts + part] + slot * self.device.slot_stride

    def _move(self, source: int, destination: int) -> None:
        stream, event = self._driver.open_stream(urgent=False), self._driver.make_event(shared=False)
        size_bytes = array("Q", [self.geometry.plane_bytes])
        self._driver.copy(stream, array("Q", [source]), array("Q", [destination]), size_bytes)
        self._driver.record(event, stream)
        self._driver.synchronize(event)
        self._driver.drop_event(event)
        self._driver.close_stream(stream)
