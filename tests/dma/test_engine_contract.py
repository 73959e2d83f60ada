"""What every copy engine promises, run against each of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.dma.checked import CheckedCopyEngine
from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import CopyEngine, CopyPlan, Direction
from kvcoord.dma.faults import CopyFaults, FaultyCopyEngine
from kvcoord.dma.moving import Move, move_calls
from kvcoord.dma.pieces import Piece, PlanePair
from kvcoord.dma.transfer import Transfer
from kvcoord.errors import DriverCallFailed, TransferFailed, UsageError
from kvcoord.memory.geometry import PoolGeometry
from tests.dma import gpu
from tests.dma.fake_driver import FakeDriver
from tests.dma.gate import stand_in
from tests.dma.pools import CAPACITY, KV, LAYERS, PAGE_BYTES, HostPools, Pools, pattern

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


def fake_gpu(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CudaCopyEngine(loop, FakeDriver(seed=1), LAYERS)


def fake_gpu_one_at_a_time(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CudaCopyEngine(loop, FakeDriver(seed=2), LAYERS, bytes_in_flight_max=1)


def checked(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CheckedCopyEngine(loop, threaded(loop))


def checked_fake_gpu(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CheckedCopyEngine(loop, fake_gpu(loop))


def real_gpu(loop: asyncio.AbstractEventLoop) -> CopyEngine:
    return CudaCopyEngine(loop, gpu.driver(), LAYERS)


ON_CPU = [inline, threaded, two_threads, mixed, behind_no_faults, behind_random_delays, checked]
ENGINES = [*ON_CPU, fake_gpu, fake_gpu_one_at_a_time, checked_fake_gpu]
EVERYWHERE = [*ENGINES, pytest.param(real_gpu, marks=pytest.mark.skipif(bool(gpu.missing()), reason=gpu.missing()))]


@pytest.fixture(params=EVERYWHERE, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


@pytest.fixture
def pools(make: Make) -> Iterator[HostPools]:
    pools = pools_for(make)
    yield pools
    pools.close()


def pools_for(make: Make, geometry: PoolGeometry = KV) -> HostPools:
    return gpu.GpuPools(geometry) if make is real_gpu else Pools(geometry)


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


async def test_the_bytes_arrive_in_their_slots_and_nowhere_else(engine: CopyEngine, pools: HostPools) -> None:
    device_slots, host_slots = [0, 1, 2, 9, 30, 63], [5, 6, 7, 0, 63, 31]
    await engine.submit(pools.plan("write/1", device_slots, host_slots))
    pools.expect_host(zip(device_slots, host_slots, strict=True))


async def test_both_directions_bring_a_page_there_and_back(engine: CopyEngine, pools: HostPools) -> None:
    await engine.submit(pools.plan("write/1", [3, 4], [20, 10]))
    await engine.submit(pools.load("load/1", [20], [7]))
    for layer in range(LAYERS):
        assert pools.device_page(layer, 7) == pattern(KV, layer, 3)
        assert pools.device_page(layer, 4) == pattern(KV, layer, 4)


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


async def test_transfers_of_one_direction_settle_in_submission_order(engine: CopyEngine, pools: HostPools) -> None:
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


async def test_nothing_settles_inside_submit(engine: CopyEngine, pools: HostPools) -> None:
    transfer = engine.submit(pools.plan("write/1", [0]))
    assert not transfer.done()
    assert transfer.layers_landed == 0
    await transfer
    assert transfer.done()


async def test_a_landed_layer_has_its_bytes_in_place(engine: CopyEngine, pools: HostPools) -> None:
    transfer = engine.submit(pools.plan("load/1", range(CAPACITY)))
    for layer in range(LAYERS):
        await transfer.layer(layer)
        assert transfer.layers_landed > layer
        for slot in range(CAPACITY):
            assert bytes(pools.host.view(layer, slot)) == pattern(KV, layer, slot)
    await transfer


async def test_a_loaded_layer_has_its_bytes_in_place(engine: CopyEngine, pools: HostPools) -> None:
    await engine.submit(pools.plan("write/1", range(16)))
    transfer = engine.submit(pools.load("load/1", range(16), range(40, 56)))
    for layer in range(LAYERS):
        await transfer.layer(layer)
        for slot in range(16):
            assert pools.device_page(layer, 40 + slot) == pattern(KV, layer, slot)
    await transfer


async def test_cancelled_awaiters_do_not_stop_the_copy(engine: CopyEngine, pools: HostPools) -> None:
    transfer = engine.submit(pools.plan("write/1", range(CAPACITY)))
    waiting = [asyncio.ensure_future(transfer), asyncio.ensure_future(transfer.layer(LAYERS - 1))]
    await asyncio.sleep(0)
    for future in waiting:
        future.cancel()
    await transfer
    pools.expect_host((slot, slot) for slot in range(CAPACITY))


async def test_pools_of_one_operation_are_one_transfer_also_with_unequal_layers(
    make: Make, engine: CopyEngine, pools: HostPools
) -> None:
    state = pools_for(make, PoolGeometry("state", 2, 32, "float32"))
    parts = (state.backup([4], [9]), pools.backup([0, 1], [8, 9]))
    transfer = engine.submit(CopyPlan("write/1", Direction.DEVICE_TO_HOST, parts))
    assert transfer.layer_count == LAYERS
    await transfer.layer(1)
    state.expect_host([(4, 9)])
    await transfer
    pools.expect_host([(0, 8), (1, 9)])


async def test_a_transfer_of_no_pages_lands_all_its_layers(engine: CopyEngine, pools: HostPools) -> None:
    transfer = engine.submit(pools.plan("write/1", []))
    await transfer
    assert transfer.layers_landed == LAYERS
    pools.expect_host([])


async def test_adjacent_pages_are_moved_as_one(engine: CopyEngine, pools: HostPools) -> None:
    await engine.submit(pools.plan("write/1", range(10, 40), range(20, 50)))
    assert engine.statistics().device_to_host.runs == LAYERS
    await engine.submit(pools.plan("write/2", [0, 1, 5], [0, 1, 2]))
    assert engine.statistics().device_to_host.runs == LAYERS + 2 * LAYERS


async def test_statistics_count_each_direction_for_itself(engine: CopyEngine, pools: HostPools) -> None:
    await engine.submit(pools.plan("write/1", [0, 1, 2]))
    await engine.submit(pools.load("load/1", [1], [1]))
    out, home = engine.statistics().device_to_host, engine.statistics().host_to_device
    assert (out.transfers, out.copied_bytes, out.failed) == (1, 3 * PAGE_BYTES * LAYERS, 0)
    assert (home.transfers, home.copied_bytes, home.runs) == (1, PAGE_BYTES * LAYERS, LAYERS)
    assert out.copying_s > 0


async def test_bytes_are_in_flight_from_submit_to_settling(engine: CopyEngine, pools: HostPools) -> None:
    first = engine.submit(pools.plan("write/1", [0, 1]))
    second = engine.submit(pools.plan("write/2", [2]))
    assert engine.bytes_in_flight == 3 * PAGE_BYTES * LAYERS
    await asyncio.gather(first, second)
    assert engine.bytes_in_flight == 0


async def test_closing_waits_for_every_copy_and_then_refuses_more(engine: CopyEngine, pools: HostPools) -> None:
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(20)]
    closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UsageError):
        engine.submit(pools.plan("write/late", [30]))
    await asyncio.gather(*closing)
    assert all(transfer.done() and transfer.failed is None for transfer in transfers)
    pools.expect_host((slot, slot) for slot in range(20))
    await engine.close()


async def test_a_closed_memory_is_refused_before_anything_is_copied(
    make: Make, engine: CopyEngine, pools: HostPools
) -> None:
    state = pools_for(make, PoolGeometry("state", 2, 32, "float32"))
    plan = CopyPlan("write/1", Direction.DEVICE_TO_HOST, (pools.backup([0], [0]), state.backup([4], [9])))
    state.host.close()
    with pytest.raises(UsageError):
        engine.submit(plan)
    assert engine.bytes_in_flight == 0
    pools.expect_host([])


async def test_memory_can_be_closed_as_soon_as_its_copies_are_over(engine: CopyEngine, pools: HostPools) -> None:
    await engine.submit(pools.plan("write/1", range(CAPACITY)))
    mapping = pools.host._map
    pools.host.close()
    assert mapping is not None
    assert mapping.closed


@pytest.mark.parametrize("fail_at_layer", range(LAYERS))
@pytest.mark.parametrize("kind", ["inline", "threaded", "on purpose", "gpu"])
async def test_a_failure_at_any_layer_settles_the_transfer_and_spares_the_next(
    monkeypatch: pytest.MonkeyPatch, kind: str, fail_at_layer: int
) -> None:
    loop = asyncio.get_running_loop()
    with_failure: dict[str, Callable[[], CopyEngine]] = {
        "inline": lambda: inline(loop),
        "threaded": lambda: threaded(loop),
        "on purpose": lambda: FaultyCopyEngine(
            loop, inline(loop), CopyFaults(fail_at_layer={"load/bad": fail_at_layer})
        ),
        "gpu": lambda: CudaCopyEngine(loop, FakeDriver(calls_failing={"copy": {fail_at_layer}}), LAYERS),
    }
    engine = with_failure[kind]()
    if kind in ("inline", "threaded"):
        stand_in(monkeypatch, failing_move(call=fail_at_layer))
    pools = Pools()
    bad = engine.submit(pools.load("load/bad", [1], [9]))
    good = engine.submit(pools.load("load/good", [2], [8]))
    landed = await asyncio.gather(*(bad.layer(index) for index in range(LAYERS)), return_exceptions=True)
    assert [result is None for result in landed] == [index < fail_at_layer for index in range(LAYERS)]
    with pytest.raises(TransferFailed) as caught:
        await bad
    assert (caught.value.transfer, caught.value.layer) == ("load/bad", fail_at_layer)
    await good
    assert pools.device_page(LAYERS - 1, 8) == bytes(PAGE_BYTES)
    assert engine.bytes_in_flight == 0
    await engine.close()


@pytest.mark.parametrize("make", [*ON_CPU, fake_gpu], ids=lambda make: make.__name__)
async def test_closing_waits_also_for_copies_that_fail(
    make: Make, engine: CopyEngine, pools: HostPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, failing_move(call=None))
    monkeypatch.setattr(FakeDriver, "copy", refusing_copy)
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(3)]
    await engine.close()
    assert all(transfer.failed for transfer in transfers)


def refusing_copy(*_: object) -> None:
    raise DriverCallFailed("copy", 1, "injected")


def failing_move(call: int | None) -> Move:
    """Moves pieces, except that the given call, counted from 0, fails; None: all do."""
    calls = iter(range(2**31))

    def move(planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        if call in (None, next(calls)):
            raise OSError("injected")
        move_calls(planes, pieces)

    return move
