"""Every pair of layouts, on every engine: the bytes arrive in their planes, and nowhere else."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char

import pytest

from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import CopyEngine, CopyPlan, Direction, PoolCopy
from kvcoord.domain import Layout
from kvcoord.errors import ConfigError, UsageError
from kvcoord.memory.device import DevicePages
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from tests.dma.fake_driver import FakeDriver
from tests.dma.pools import CAPACITY, Pools, pattern

MHA = PoolGeometry("kv", 3, 64, "bfloat16", parts=2)
MLA = PoolGeometry("latent", 3, 48, "float8_e4m3fn")
ONE_LAYER = PoolGeometry("draft", 1, 40, "bfloat16")

ENGINES: list[Callable[[asyncio.AbstractEventLoop], CopyEngine]] = [
    CpuCopyEngine,
    lambda loop: CudaCopyEngine(loop, FakeDriver(), 3),
]


@pytest.mark.parametrize("geometry", [MHA, MLA, ONE_LAYER], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize(("device", "host"), list(itertools.product(Layout, Layout)))
@pytest.mark.parametrize("make", ENGINES, ids=["cpu", "fake_gpu"])
async def test_pages_go_there_and_back_between_any_two_layouts(
    make: Callable[[asyncio.AbstractEventLoop], CopyEngine], device: Layout, host: Layout, geometry: PoolGeometry
) -> None:
    chosen = random.Random(1)
    device_slots = [*chosen.sample(range(32), 20), 32, 33, 34]
    host_slots = [*chosen.sample(range(32), 20), 50, 51, 52]
    pools = Pools(geometry, CAPACITY, device, host)
    engine = make(asyncio.get_running_loop())
    await engine.submit(pools.plan("write/1", device_slots, host_slots))
    pools.expect_host(zip(device_slots, host_slots, strict=True))
    await engine.submit(pools.load("load/1", host_slots[:5], range(40, 45)))
    for layer, part in itertools.product(range(geometry.layer_count), range(geometry.parts)):
        for at in range(5):
            assert pools.device_page(layer, 40 + at, part) == pattern(geometry, layer, device_slots[at], part)
        assert pools.device_page(layer, 45, part) == pattern(geometry, layer, 45, part)
    await engine.close()
    pools.close()


@pytest.mark.parametrize(
    ("device", "host", "pieces"),
    [
        (Layout.LAYER_FIRST, Layout.LAYER_FIRST, 2 * 6),
        (Layout.LAYER_FIRST, Layout.PAGE_FIRST, 5 * 6),
        (Layout.PAGE_FIRST, Layout.PAGE_FIRST, 2),
    ],
)
def test_what_lies_together_on_both_sides_is_one_piece(device: Layout, host: Layout, pieces: int) -> None:
    pools = Pools(MHA, CAPACITY, device, host)
    copy = pools.backup([0, 1, 2, 9, 10], [4, 5, 6, 1, 2])
    assert copy.piece_count == pieces
    assert copy.total_bytes == 5 * MHA.whole_page_bytes
    pools.close()


def test_a_layer_never_counts_as_landed_before_the_pieces_that_hold_it() -> None:
    pools = Pools(MHA, CAPACITY, Layout.PAGE_FIRST, Layout.PAGE_FIRST)
    copy = pools.backup([0], [0])
    assert [len(pairs) for pairs in copy.layers] == [1, 0, 0]
    pools.close()


def test_pages_with_keys_and_values_apart_do_not_pair_with_pages_without() -> None:
    joined = PoolGeometry("kv", 3, 64, "bfloat16")
    with PageMemory.anonymous(MHA, 4) as left, PageMemory.anonymous(joined, 4) as right:
        with pytest.raises(UsageError) as caught:
            PoolCopy(left, right, [0], [0])
        assert caught.value.field == "parts"


@pytest.mark.parametrize("parts", [0, 3, -1])
def test_parts_must_divide_the_bytes_of_a_page(parts: int) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolGeometry("kv", 3, 64, "bfloat16", parts)
    assert caught.value.field == "pools.kv.parts"


async def test_an_engine_that_keeps_a_tensor_for_each_layer_names_them_one_by_one() -> None:
    """Keys and values of each layer in allocations of their own, in no order, as engines make them."""
    tensors = [bytearray(CAPACITY * MHA.plane_bytes) for _ in range(MHA.plane_count)]
    order = [3, 0, 5, 1, 4, 2]
    planes = [addressof(c_char.from_buffer(tensors[number])) for number in order]
    device = DevicePages(FakeDriver(), MHA, CAPACITY, planes)
    for layer, part in itertools.product(range(3), range(2)):
        for slot in range(CAPACITY):
            _piece(tensors, order, layer, part, slot)[:] = pattern(MHA, layer, slot, part)
    host = PageMemory.anonymous(MHA, CAPACITY, Layout.PAGE_FIRST)
    engine = CpuCopyEngine(asyncio.get_running_loop())
    await engine.submit(CopyPlan("write/1", Direction.DEVICE_TO_HOST, (PoolCopy(device, host, [7, 8], [1, 9]),)))
    for layer, part in itertools.product(range(3), range(2)):
        assert bytes(host.view(layer, 9, part)) == pattern(MHA, layer, 8, part)
    await engine.close()
    host.close()


def _piece(tensors: Sequence[bytearray], order: Sequence[int], layer: int, part: int, slot: int) -> memoryview:
    start = slot * MHA.plane_bytes
    return memoryview(tensors[order[layer * 2 + part]])[start : start + MHA.plane_bytes]
