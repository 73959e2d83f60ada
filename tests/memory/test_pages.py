import pytest

from kvcoord.domain import Layout
from kvcoord.errors import ConfigError, UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory

GEOMETRY = PoolGeometry(name="kv", layer_count=3, page_bytes=64, dtype="bfloat16")


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "k\0v"), ("layer_count", 0), ("page_bytes", 0), ("page_bytes", -4), ("dtype", "")],
)
def test_a_geometry_that_can_never_work_is_refused_by_field_and_value(field: str, value: object) -> None:
    fields: dict[str, object] = {"name": "kv", "layer_count": 3, "page_bytes": 64, "dtype": "bfloat16", field: value}
    with pytest.raises(ConfigError) as caught:
        PoolGeometry(**fields)  # type: ignore[arg-type]
    assert caught.value.field.endswith(field)
    assert caught.value.value == value


def test_total_bytes_count_every_layer_of_every_page() -> None:
    assert GEOMETRY.total_bytes(10) == 3 * 10 * 64
    with pytest.raises(ConfigError):
        GEOMETRY.total_bytes(0)


def test_every_page_of_every_layer_has_its_own_zeroed_bytes() -> None:
    memory = PageMemory.anonymous(GEOMETRY, 5)
    pages = [(layer, slot) for layer in range(3) for slot in range(5)]
    for number, (layer, slot) in enumerate(pages, start=1):
        page = memory.view(layer, slot)
        assert bytes(page) == bytes(64)
        page[:] = bytes([number]) * 64
    for number, (layer, slot) in enumerate(pages, start=1):
        assert bytes(memory.view(layer, slot)) == bytes([number]) * 64
    memory.close()


def test_the_layout_is_layer_first_so_that_adjacent_slots_are_adjacent_bytes() -> None:
    memory = PageMemory.anonymous(GEOMETRY, 5)
    assert memory.size_bytes == 3 * 5 * 64
    assert memory.layer_stride == 5 * 64
    assert memory.address(0, 0) == memory.base_address
    assert memory.address(0, 3) - memory.address(0, 2) == 64
    assert memory.address(2, 4) - memory.address(1, 4) == memory.layer_stride
    memory.view(1, 2)[:] = b"x" * 64
    with memory.buffer() as whole:
        start = memory.address(1, 2) - memory.base_address
        assert bytes(whole[start : start + 64]) == b"x" * 64
        assert bytes(whole).count(b"x") == 64
    memory.close()


@pytest.mark.parametrize(("layer", "slot"), [(-1, 0), (3, 0), (0, -1), (0, 5)])
def test_a_page_outside_the_pool_has_neither_view_nor_address(layer: int, slot: int) -> None:
    memory = PageMemory.anonymous(GEOMETRY, 5)
    with pytest.raises(UsageError):
        memory.view(layer, slot)
    with pytest.raises(UsageError):
        memory.address(layer, slot)
    memory.close()


def test_closing_is_idempotent_and_ends_every_way_to_the_bytes() -> None:
    memory = PageMemory.anonymous(GEOMETRY, 5)
    memory.close()
    memory.close()
    assert memory.closed
    for use in (lambda: memory.view(0, 0), lambda: memory.address(0, 0), memory.buffer):
        with pytest.raises(UsageError):
            use()


def test_a_view_outlives_close_and_the_map_ends_with_it() -> None:
    memory = PageMemory.anonymous(GEOMETRY, 5)
    page = memory.view(2, 1)
    page[:] = b"y" * 64
    memory.close()
    assert bytes(page) == b"y" * 64


def test_a_pool_larger_than_any_memory_is_refused_with_the_capacity() -> None:
    for capacity in (2**45, 2**70):
        with pytest.raises(ConfigError) as caught:
            PageMemory.anonymous(GEOMETRY, capacity)
        assert caught.value.field == "pools.kv.capacity"
        assert caught.value.value == capacity


def test_page_first_keeps_a_page_together_over_all_layers_and_parts() -> None:
    geometry = PoolGeometry("kv", 3, 64, "bfloat16", parts=2)
    memory = PageMemory.anonymous(geometry, 5, Layout.PAGE_FIRST)
    assert (memory.plane_stride, memory.layer_stride, memory.slot_stride) == (32, 64, 192)
    pieces = [memory.address(layer, 1, part) for layer in range(3) for part in range(2)]
    assert pieces == list(range(memory.base_address + 192, memory.base_address + 384, 32))
    memory.close()


@pytest.mark.parametrize("layout", Layout)
def test_in_every_layout_each_part_of_each_page_of_each_layer_has_bytes_of_its_own(layout: Layout) -> None:
    geometry = PoolGeometry("kv", 3, 64, "bfloat16", parts=2)
    memory = PageMemory.anonymous(geometry, 5, layout)
    places = [(layer, slot, part) for layer in range(3) for slot in range(5) for part in range(2)]
    for number, place in enumerate(places, start=1):
        memory.view(*place)[:] = bytes([number]) * 32
    for number, place in enumerate(places, start=1):
        assert bytes(memory.view(*place)) == bytes([number]) * 32
        layer, slot, part = place
        assert memory.address(*place) == memory.planes[layer * 2 + part] + slot * memory.slot_stride
    with pytest.raises(UsageError):
        memory.view(0, 0, 2)
    memory.close()
