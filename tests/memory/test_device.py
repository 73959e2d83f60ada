"""Pages on a GPU, shared between two processes: here both are this one, with one driver between them."""

from collections.abc import Callable

import msgspec
import pytest

from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.memory.device import DeviceHandle, DevicePages, attach
from kvcoord.memory.geometry import PoolGeometry
from tests.dma.fake_driver import FakeDriver

KV = PoolGeometry("kv", 2, 64, "bfloat16", parts=2)
CAPACITY = 8
PLANE_BYTES = CAPACITY * KV.plane_bytes


class Engine:
    """Keys of both layers in one allocation, values in another, as a caching allocator may place them."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.keys, self.values = (self.driver.allocate(4096) for _ in range(2))
        planes = [self.keys, self.values + 512, self.keys + PLANE_BYTES, self.values + 512 + PLANE_BYTES]
        self.pages = DevicePages(self.driver, KV, CAPACITY, planes)


def test_a_handle_names_each_allocation_once_and_where_the_planes_are_in_it() -> None:
    engine = Engine()
    handle = engine.pages.handle()
    assert len(handle.allocations) == 2
    assert handle.planes == [(0, 0), (1, 512), (0, PLANE_BYTES), (1, 512 + PLANE_BYTES)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=DeviceHandle) == handle


def test_attached_pages_are_the_same_memory_until_they_are_closed() -> None:
    engine = Engine()
    pages = attach(engine.driver, engine.pages.handle())
    assert pages.planes == engine.pages.planes
    assert (pages.geometry, pages.capacity, pages.slot_stride) == (KV, CAPACITY, KV.plane_bytes)
    assert len(engine.driver.opened) == 2
    pages.close()
    pages.close()
    assert engine.driver.opened == []


def test_a_copy_under_way_keeps_the_map_and_its_end_gives_it_back() -> None:
    engine = Engine()
    pages = attach(engine.driver, engine.pages.handle())
    first, second = pages.hold(), pages.hold()
    pages.close()
    assert pages.closed
    first.release()
    first.release()
    assert len(engine.driver.opened) == 2
    second.release()
    assert engine.driver.opened == []
    with pytest.raises(UsageError):
        pages.hold()


def test_pages_whose_owner_is_gone_are_told_as_gone_and_nothing_stays_open() -> None:
    engine = Engine()
    handle = engine.pages.handle()
    engine.driver.free(engine.values)
    with pytest.raises(PeerUnavailable) as caught:
        attach(engine.driver, handle)
    assert "kv" in caught.value.address
    assert engine.driver.opened == []


def test_pages_of_another_gpu_are_refused() -> None:
    engine = Engine()
    with pytest.raises(ConfigError) as caught:
        attach(FakeDriver(device="another"), engine.pages.handle())
    assert caught.value.field == "handle.device"


@pytest.mark.parametrize(
    "change",
    [
        lambda handle: msgspec.structs.replace(handle, capacity=1000),
        lambda handle: msgspec.structs.replace(handle, planes=[(0, 0), (0, 0), (0, 0), (7, 0)]),
        lambda handle: msgspec.structs.replace(handle, planes=[(0, 0), (0, 0), (0, 0), (0, 4090)]),
        lambda handle: msgspec.structs.replace(handle, planes=[(0, 0)]),
        lambda handle: msgspec.structs.replace(handle, slot_stride=1),
    ],
)
def test_a_handle_that_contradicts_itself_is_refused_and_nothing_stays_open(
    change: Callable[[DeviceHandle], DeviceHandle],
) -> None:
    engine = Engine()
    with pytest.raises((ConfigError, UsageError)):
        attach(engine.driver, change(engine.pages.handle()))
    assert engine.driver.opened == []


@pytest.mark.parametrize("field", ["allocations", "planes", "slot_stride", "capacity"])
def test_a_handle_from_the_wire_is_checked_field_by_field(field: str) -> None:
    wrong = {"allocations": [b"short"], "planes": [(0, -1)], "slot_stride": 0, "capacity": 0}
    good = msgspec.to_builtins(Engine().pages.handle(), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, field: wrong[field]}, DeviceHandle)


def test_memory_that_cannot_be_shared_says_how_to_allocate_it() -> None:
    engine = Engine()
    engine.driver.calls_failing = {"export_memory": {0}}
    with pytest.raises(UsageError, match="expandable_segments"):
        engine.pages.handle()
    engine.pages.close()
    with pytest.raises(UsageError, match="are closed"):
        engine.pages.handle()


@pytest.mark.parametrize(("planes", "slot_stride", "field"), [(3, 0, "planes"), (4, 31, "slot_stride")])
def test_pages_of_another_shape_than_their_geometry_are_refused(planes: int, slot_stride: int, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        DevicePages(FakeDriver(), KV, CAPACITY, [0] * planes, slot_stride)
    assert caught.value.field == field
