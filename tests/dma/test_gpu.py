"""On a real GPU, where there is one: bytes there and back, in all sizes and layouts, under jitter, with time losses.

What needs no GPU to be shown (orders, limits, failures) is in the other files of this folder.
"""

import asyncio
import itertools
import random

import pytest

from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.jitter import JitteryDriver
from kvcoord.domain import Layout
from kvcoord.memory.geometry import PoolGeometry
from tests.dma import gpu
from tests.dma.pools import pattern

pytestmark = pytest.mark.skipif(bool(gpu.missing()), reason=gpu.missing())

PAGES = 24
LAYERS = 3


def expect_device(pools: gpu.GpuPools, pairs: list[tuple[int, int]]) -> None:
    """The device holds in the second slot of each pair what it held at first in the first one."""
    geometry = pools.geometry
    for (was, now), layer, part in itertools.product(pairs, range(geometry.layer_count), range(geometry.parts)):
        assert pools.device_page(layer, now, part) == pattern(geometry, layer, was, part)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536, 1 << 20])
async def test_pages_of_every_size_and_layout_go_out_and_come_back(page_bytes: int, layout: Layout) -> None:
    geometry = PoolGeometry("kv", LAYERS, page_bytes, "bfloat16", parts=2)
    pools = gpu.GpuPools(geometry, PAGES, layout)
    engine = CudaCopyEngine(asyncio.get_running_loop(), gpu.driver(), LAYERS)
    engine.pin(pools.host, chunk_bytes=1 << 20)
    out, slots = random.Random(1).sample(range(12), 10), random.Random(2).sample(range(PAGES), 10)
    await engine.submit(pools.plan("write/1", out, slots))
    pools.expect_host(zip(out, slots, strict=True))
    load = engine.submit(pools.load("load/1", slots, range(12, 22)))
    for layer in range(LAYERS):
        await load.layer(layer)
    await load
    expect_device(pools, list(zip(out, range(12, 22), strict=True)))
    assert engine.statistics().host_to_device.copying_s > 0
    await engine.close()
    pools.close()


async def test_jitter_after_every_event_shows_no_missing_wait() -> None:
    geometry = PoolGeometry("kv", LAYERS, 16384, "bfloat16", parts=2)
    pools = gpu.GpuPools(geometry, PAGES)
    jittery = JitteryDriver(gpu.driver(), bytes_max=8 << 20, delay_s=0.001, seed=1)
    engine = CudaCopyEngine(asyncio.get_running_loop(), jittery, LAYERS, bytes_in_flight_max=1 << 20)
    engine.pin(pools.host)
    computed, computing = jittery.make_event(shared=False), jittery.open_stream(urgent=False)
    engine.follow(computed)
    for turn in range(20):
        jittery.record(computed, computing)
        await engine.submit(pools.plan(f"write/{turn}", range(8), range(8)))
        loads = [engine.submit(pools.load(f"load/{turn}/{at}", [at], [8 + at])) for at in range(8)]
        engine.wait_written(computing)
        await asyncio.gather(*loads)
        expect_device(pools, [(at, 8 + at) for at in range(8)])
    await engine.close()
    jittery.drop_event(computed)
    jittery.close_stream(computing)
    jittery.close()
    pools.close()
