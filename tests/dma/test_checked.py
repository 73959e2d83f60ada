import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvcoord.dma.checked import CheckedCopyEngine, page_sum
from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import CopyEngine, CopyPlan, Direction
from kvcoord.domain import Layout
from kvcoord.errors import TransferFailed
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from tests.dma.fake_driver import FakeDriver
from tests.dma.pools import LAYERS, Pools, pattern


def on_cpu(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CpuCopyEngine(loop)


def on_fake_gpu(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CudaCopyEngine(loop, FakeDriver(), LAYERS)


@pytest.fixture(params=[on_cpu, on_fake_gpu])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[CheckedCopyEngine]:
    loop = asyncio.get_running_loop()
    make: Callable[[asyncio.AbstractEventLoop], CopyEngine] = request.param
    engine = CheckedCopyEngine(loop, make(loop))
    yield engine
    await engine.close()


@pytest.mark.parametrize("layer", range(LAYERS))
async def test_a_page_changed_on_the_host_is_not_loaded_and_says_which(
    engine: CheckedCopyEngine, pools: Pools, layer: int
) -> None:
    await engine.submit(pools.plan("write/1", [0, 1, 2], [5, 6, 7]))
    pools.host.view(layer, 6)[3] ^= 1
    with pytest.raises(TransferFailed) as caught:
        await engine.submit(pools.load("load/1", [5, 6, 7], [30, 31, 32]))
    assert caught.value.layer == 0
    assert "slot 6" in caught.value.cause
    assert engine.mismatches == 1
    for slot in (30, 31, 32):
        assert pools.device_page(0, slot) == pattern(pools.geometry, 0, slot)
    assert engine.statistics().host_to_device.transfers == 0


async def test_unchanged_pages_pass_in_other_portions_than_they_were_written(
    engine: CheckedCopyEngine, pools: Pools
) -> None:
    await engine.submit(pools.plan("write/1", [0, 1, 2], [5, 6, 7]))
    await engine.submit(pools.plan("write/2", [9], [2]))
    await engine.submit(pools.load("load/1", [7, 2], [30, 31]))
    assert pools.device_page(2, 30) == pattern(pools.geometry, 2, 2)
    assert engine.mismatches == 0


async def test_a_slot_written_anew_has_a_new_checksum(engine: CheckedCopyEngine, pools: Pools) -> None:
    await engine.submit(pools.plan("write/1", [0], [5]))
    await engine.submit(pools.plan("write/2", [1], [5]))
    await engine.submit(pools.load("load/1", [5], [30]))
    assert pools.device_page(0, 30) == pattern(pools.geometry, 0, 1)


async def test_a_slot_never_written_through_passes(engine: CheckedCopyEngine, pools: Pools) -> None:
    await engine.submit(pools.load("load/1", [5], [30]))
    assert pools.device_page(0, 30) == bytes(pools.geometry.page_bytes)


async def test_a_refused_load_settles_after_earlier_loads_and_spares_later_ones(
    engine: CheckedCopyEngine, pools: Pools
) -> None:
    await engine.submit(pools.plan("write/1", [0, 1, 2], [5, 6, 7]))
    pools.host.view(0, 6)[0] ^= 1
    settled: list[str] = []
    loads = [engine.submit(pools.load(f"load/{slot}", [slot], [slot + 30])) for slot in (5, 6, 7)]
    for load in loads:
        load.add_done_callback(lambda transfer: settled.append(transfer.name))
    await asyncio.gather(*loads, return_exceptions=True)
    await asyncio.sleep(0)
    assert settled == ["load/5", "load/6", "load/7"]
    assert [load.failed is None for load in loads] == [True, False, True]


async def test_every_pool_of_an_operation_is_checked(engine: CheckedCopyEngine, pools: Pools) -> None:
    state = Pools(PoolGeometry("state", 2, 32, "float32"))
    both = (pools.backup([0], [5]), state.backup([4], [9]))
    await engine.submit(CopyPlan("write/1", Direction.DEVICE_TO_HOST, both))
    state.host.view(1, 9)[31] ^= 1
    back = (pools.restore([5], [30]), state.restore([9], [3]))
    with pytest.raises(TransferFailed, match="slot 9 in host pool state"):
        await engine.submit(CopyPlan("load/1", Direction.HOST_TO_DEVICE, back))


def test_the_checksum_is_of_the_whole_page_and_does_not_depend_on_the_layout() -> None:
    geometry = PoolGeometry("kv", 3, 64, "bfloat16", parts=2)
    sums = set()
    for layout in Layout:
        with PageMemory.anonymous(geometry, 4, layout) as memory:
            for layer in range(3):
                for part in range(2):
                    memory.view(layer, 2, part)[:] = pattern(geometry, layer, 2, part)
            sums.add(page_sum(memory, 2))
            before = page_sum(memory, 1)
            memory.view(2, 1, 1)[31] ^= 1
            assert page_sum(memory, 1) != before
    assert len(sums) == 1
