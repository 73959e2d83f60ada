"""What every copy engine promises, run against each of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ctypes import memmove

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.dma import cpu
from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.engine import CopyEngine, CopyPlan, Direction, PoolCopy
from kvcoord.dma.faults import CopyFaults, FaultyCopyEngine
from kvcoord.dma.transfer import Transfer
from kvcoord.errors import TransferFailed, UsageError
from kvcoord.memory.geometry import PoolGeometry
from tests.dma.pools import CAPACITY, LAYERS, PAGE_BYTES, Pools

Make = Callable[[asyncio.AbstractEventLoop], CopyEngine]


def inline(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CpuCopyEngine(loop)


def threaded(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CpuCopyEngine(loop, inline_bytes_max=0)


def two_threads(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CpuCopyEngine(loop, inline_bytes_max=0, threads=2)


def mixed(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CpuCopyEngine(loop, inline_bytes_max=2 * PAGE_BYTES * LAYERS)


def behind_no_faults(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return FaultyCopyEngine(loop, inline(loop), CopyFaults())


def behind_random_delays(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return FaultyCopyEngine(loop, threaded(loop), CopyFaults(delay_random_s=0.001, seed=7))


ENGINES = [inline, threaded, two_threads, mixed, behind_no_faults, behind_random_delays]


@pytest.fixture(params=ENGINES, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


@pytest.fixture
async def engine(make: Make) -> AsyncIterator[CopyEngine]:
    async with opened(make) as engine:
        yield engine


@asynccontextmanager
async def opened(make: Make) -> AsyncIterator[CopyEngine]:
    engine = make(asyncio.get_running_loop())
    try:
        yield engine
    finally:
        await engine.close()


async def test_the_bytes_arrive_in_their_slots_and_nowhere_else(engine: CopyEngine, pools: Pools) -> None:
    device_slots, host_slots = [0, 1, 2, 9, 30, 63], [5, 6, 7, 0, 63, 31]
    await engine.submit(pools.plan("write/1", device_slots, host_slots))
    pools.expect_host(zip(device_slots, host_slots, strict=True))


async def test_both_directions_bring_a_page_there_and_back(engine: CopyEngine, pools: Pools) -> None:
    await engine.submit(pools.plan("write/1", [3, 4], [20, 10]))
    for layer in range(LAYERS):
        pools.device.view(layer, 3)[:] = bytes(PAGE_BYTES)
    back = PoolCopy(pools.host, pools.device, [20], [3])
    await engine.submit(CopyPlan("load/1", Direction.HOST_TO_DEVICE, (back,)))
    for layer in range(LAYERS):
        assert bytes(pools.device.view(layer, 3)) == bytes(pools.host.view(layer, 20)) != bytes(PAGE_BYTES)


@pytest.mark.parametrize("make_engine", ENGINES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, CAPACITY))
def test_any_set_of_slots_is_copied_exactly(make_engine: Make, seed: int, count: int) -> None:
    chosen = random.Random(seed)
    device_slots = chosen.sample(range(CAPACITY), count)
    host_slots = chosen.sample(range(CAPACITY), count)
    pools = Pools()

    async def copy() -> None:
        async with opened(make_engine) as engine:
            await engine.submit(pools.plan("write/1", device_slots, host_slots))

    asyncio.run(copy())
    pools.expect_host(zip(device_slots, host_slots, strict=True))


async def test_transfers_of_one_direction_settle_in_submission_order(engine: CopyEngine, pools: Pools) -> None:
    sizes = random.Random(3)
    settled: list[str] = []
    transfers: list[Transfer] = []
    for number in range(40):
        slots = range(sizes.choice((1, 2, 40)))
        transfers.append(engine.submit(pools.plan(f"write/{number}", slots)))
        transfers[-1].add_done_callback(lambda transfer: settled.append(transfer.name))
    await asyncio.gather(*transfers)
    await asyncio.sleep(0)
    assert settled == [f"write/{number}" for number in range(40)]


async def test_nothing_settles_inside_submit(engine: CopyEngine, pools: Pools) -> None:
    transfer = engine.submit(pools.plan("write/1", [0]))
    assert not transfer.done()
    assert transfer.layers_landed == 0
    await transfer
    assert transfer.done()


async def test_a_landed_layer_has_its_bytes_in_place(engine: CopyEngine, pools: Pools) -> None:
    transfer = engine.submit(pools.plan("load/1", range(CAPACITY)))
    for layer in range(LAYERS):
        await transfer.layer(layer)
        assert transfer.layers_landed > layer
        for slot in range(CAPACITY):
            assert bytes(pools.host.view(layer, slot)) == bytes(pools.device.view(layer, slot))
    await transfer


async def test_cancelled_awaiters_do_not_stop_the_copy(engine: CopyEngine, pools: Pools) -> None:
    transfer = engine.submit(pools.plan("write/1", range(CAPACITY)))
    waiting = [asyncio.ensure_future(transfer), asyncio.ensure_future(transfer.layer(LAYERS - 1))]
    await asyncio.sleep(0)
    for future in waiting:
        future.cancel()
    await transfer
    pools.expect_host((slot, slot) for slot in range(CAPACITY))


async def test_pools_of_one_operation_are_one_transfer_also_with_unequal_layers(
    engine: CopyEngine, pools: Pools
) -> None:
    state = Pools(PoolGeometry("state", 2, 32, "float32"))
    parts = (state.backup([4], [9]), pools.backup([0, 1], [8, 9]))
    transfer = engine.submit(CopyPlan("write/1", Direction.DEVICE_TO_HOST, parts))
    assert transfer.layer_count == LAYERS
    await transfer.layer(1)
    state.expect_host([(4, 9)])
    await transfer
    pools.expect_host([(0, 8), (1, 9)])


async def test_a_transfer_of_no_pages_lands_all_its_layers(engine: CopyEngine, pools: Pools) -> None:
    transfer = engine.submit(pools.plan("write/1", []))
    await transfer
    assert transfer.layers_landed == LAYERS
    pools.expect_host([])


async def test_adjacent_pages_are_moved_as_one(engine: CopyEngine, pools: Pools) -> None:
    await engine.submit(pools.plan("write/1", range(10, 40), range(20, 50)))
    assert engine.statistics().device_to_host.runs == LAYERS
    await engine.submit(pools.plan("write/2", [0, 1, 5], [0, 1, 2]))
    assert engine.statistics().device_to_host.runs == LAYERS + 2 * LAYERS


async def test_statistics_count_each_direction_for_itself(engine: CopyEngine, pools: Pools) -> None:
    await engine.submit(pools.plan("write/1", [0, 1, 2]))
    back = PoolCopy(pools.host, pools.device, [1], [1])
    await engine.submit(CopyPlan("load/1", Direction.HOST_TO_DEVICE, (back,)))
    out, home = engine.statistics().device_to_host, engine.statistics().host_to_device
    assert (out.transfers, out.copied_bytes, out.failed) == (1, 3 * PAGE_BYTES * LAYERS, 0)
    assert (home.transfers, home.copied_bytes, home.runs) == (1, PAGE_BYTES * LAYERS, LAYERS)
    assert out.copying_s > 0


async def test_bytes_are_in_flight_from_submit_to_settling(engine: CopyEngine, pools: Pools) -> None:
    first = engine.submit(pools.plan("write/1", [0, 1]))
    second = engine.submit(pools.plan("write/2", [2]))
    assert engine.bytes_in_flight == 3 * PAGE_BYTES * LAYERS
    await asyncio.gather(first, second)
    assert engine.bytes_in_flight == 0


async def test_closing_waits_for_every_copy_and_then_refuses_more(engine: CopyEngine, pools: Pools) -> None:
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(20)]
    closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UsageError):
        engine.submit(pools.plan("write/late", [30]))
    await asyncio.gather(*closing)
    assert all(transfer.done() and transfer.failed is None for transfer in transfers)
    pools.expect_host((slot, slot) for slot in range(20))
    await engine.close()


async def test_a_closed_memory_is_refused_before_anything_is_copied(engine: CopyEngine, pools: Pools) -> None:
    state = Pools(PoolGeometry("state", 2, 32, "float32"))
    plan = CopyPlan("write/1", Direction.DEVICE_TO_HOST, (pools.backup([0], [0]), state.backup([4], [9])))
    state.host.close()
    with pytest.raises(UsageError):
        engine.submit(plan)
    assert engine.bytes_in_flight == 0
    pools.expect_host([])


async def test_memory_can_be_closed_as_soon_as_its_copies_are_over(engine: CopyEngine, pools: Pools) -> None:
    await engine.submit(pools.plan("write/1", range(CAPACITY)))
    mapping = pools.host._map
    pools.host.close()
    assert mapping is not None
    assert mapping.closed


@pytest.mark.parametrize("fail_at_layer", range(LAYERS))
@pytest.mark.parametrize("kind", ["inline", "threaded", "on purpose"])
async def test_a_failure_at_any_layer_settles_the_transfer_and_spares_the_next(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, kind: str, fail_at_layer: int
) -> None:
    loop = asyncio.get_running_loop()
    engine: CopyEngine = threaded(loop) if kind == "threaded" else inline(loop)
    if kind == "on purpose":
        engine = FaultyCopyEngine(loop, engine, CopyFaults(fail_at_layer={"load/bad": fail_at_layer}))
    else:
        monkeypatch.setattr(cpu, "memmove", failing_memmove(call=fail_at_layer))
    bad = engine.submit(pools.plan("load/bad", [1]))
    good = engine.submit(pools.plan("load/good", [2]))
    landed = await asyncio.gather(*(bad.layer(index) for index in range(LAYERS)), return_exceptions=True)
    assert [result is None for result in landed] == [index < fail_at_layer for index in range(LAYERS)]
    with pytest.raises(TransferFailed) as caught:
        await bad
    assert (caught.value.transfer, caught.value.layer) == ("load/bad", fail_at_layer)
    await good
    assert bytes(pools.host.view(LAYERS - 1, 2)) == bytes(pools.device.view(LAYERS - 1, 2))
    assert engine.bytes_in_flight == 0
    await engine.close()


async def test_closing_waits_also_for_copies_that_fail(
    engine: CopyEngine, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "memmove", failing_memmove(call=None))
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(3)]
    await engine.close()
    assert all(transfer.failed for transfer in transfers)


def failing_memmove(call: int | None) -> Callable[[int, int, int], object]:
    """Moves bytes, except that the given call, counted from 0, fails; None: all do."""
    calls = iter(range(2**31))

    def move(destination: int, source: int, size_bytes: int) -> object:
        if call in (None, next(calls)):
            raise OSError("injected")
        return memmove(destination, source, size_bytes)

    return move
