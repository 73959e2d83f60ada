"""What is special to the CUDA engine, on a driver without a GPU. What all engines promise is in the contract suite."""

import asyncio
import threading

import pytest

from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.jitter import JitteryDriver
from kvcoord.domain import Layout
from kvcoord.errors import ConfigError, TransferFailed, UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.pinned import Pinned
from tests.dma.fake_driver import FakeDriver, Seen, Work
from tests.dma.happens_before import races
from tests.dma.pools import KV, LAYERS, PAGE_BYTES, Pools, pattern
from tests.leaks import own_threads

PAGE_TOTAL_BYTES = PAGE_BYTES * LAYERS


def engine_of(
    driver: FakeDriver | JitteryDriver, *, bytes_in_flight_max: int = 1 << 20, transfers_open_max: int = 100
) -> CudaCopyEngine:
    return CudaCopyEngine(
        asyncio.get_running_loop(),
        driver,
        LAYERS,
        bytes_in_flight_max=bytes_in_flight_max,
        transfers_open_max=transfers_open_max,
    )


def copies(driver: FakeDriver) -> list[Work]:
    return [entry for entry in driver.log if isinstance(entry, Work) and entry.what == "copy"]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_each_direction_has_a_stream_of_its_own_and_loads_are_the_urgent_one(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    await engine.submit(pools.plan("write/1", [0]))
    await engine.submit(pools.load("load/1", [0], [1]))
    used = [work.stream for work in copies(driver)]
    assert [driver.urgent[stream] for stream in used] == [False] + [True] * LAYERS
    assert len(driver.streams) == 2
    await engine.close()


async def test_a_write_of_many_scattered_pages_is_one_call_and_a_load_one_for_each_layer(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    scattered = list(range(0, 40, 2))
    await engine.submit(pools.plan("write/1", scattered))
    assert driver.batches == [len(scattered) * LAYERS]
    await engine.submit(pools.load("load/1", scattered, scattered))
    assert driver.batches[1:] == [len(scattered)] * LAYERS
    await engine.close()


async def test_only_the_lanes_threads_wait_for_the_gpu_and_each_event_once(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    load = engine.submit(pools.load("load/1", [0], [1]))
    write = engine.submit(pools.plan("write/1", [0]))
    await asyncio.gather(load, write)
    assert threading.get_ident() not in driver.seen_by
    assert len(driver.seen_by) == 2
    assert sum(isinstance(entry, Seen) for entry in driver.log) == LAYERS + 1
    await engine.close()


async def test_the_loop_runs_on_while_the_gpu_copies(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver)
    transfer = engine.submit(pools.plan("write/1", [0]))
    await turns()
    assert not transfer.done()
    driver.let()
    await transfer
    await engine.close()


async def test_a_load_does_not_wait_behind_writes_that_are_still_copying(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver, bytes_in_flight_max=PAGE_TOTAL_BYTES)
    driver.hold()
    writes = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(20)]
    load = engine.submit(pools.load("load/1", [40], [41]))
    assert driver.urgent[copies(driver)[-1].stream]
    driver.let(20 + LAYERS)
    await asyncio.gather(*writes, load)
    await engine.close()


async def test_no_more_bytes_than_the_limit_are_on_a_stream_and_the_others_follow_in_order(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver, bytes_in_flight_max=2 * PAGE_TOTAL_BYTES)
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(5)]
    assert len(copies(driver)) == 2
    assert engine.bytes_in_flight == 5 * PAGE_TOTAL_BYTES
    driver.let()
    await transfers[0]
    await turns()
    assert len(copies(driver)) == 3
    driver.let(4)
    await asyncio.gather(*transfers)
    pools.expect_host((slot, slot) for slot in range(5))
    await engine.close()


async def test_one_transfer_above_the_limit_is_copied_alone(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver, bytes_in_flight_max=2 * PAGE_TOTAL_BYTES)
    small = engine.submit(pools.plan("write/small", [0]))
    large = engine.submit(pools.plan("write/large", range(1, 9)))
    assert len(copies(driver)) == 1
    driver.let()
    await small
    await turns()
    assert len(copies(driver)) == 2
    driver.let()
    await large
    await engine.close()


async def test_another_stream_can_wait_for_a_layer_only_once_its_load_has_been_started(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver, bytes_in_flight_max=1)
    reader = driver.open_stream(urgent=False)
    first = engine.submit(pools.load("load/1", [0], [1]))
    second = engine.submit(pools.load("load/2", [2], [3]))
    await engine.started(first)
    engine.wait_layer(reader, first, 2)
    with pytest.raises(UsageError, match="has not been started"):
        engine.wait_layer(reader, second, 0)
    starting = asyncio.ensure_future(engine.started(second))
    await turns()
    assert not starting.done()
    driver.let(LAYERS)
    await starting
    engine.wait_layer(reader, second, 0)
    for wrong in (-1, LAYERS):
        with pytest.raises(UsageError):
            engine.wait_layer(reader, second, wrong)
    driver.let(LAYERS)
    await second
    waits = len([entry for entry in driver.log if isinstance(entry, Work) and entry.what == "wait"])
    engine.wait_layer(reader, second, 0)
    assert len([entry for entry in driver.log if isinstance(entry, Work) and entry.what == "wait"]) == waits
    await engine.close()


async def test_a_write_has_no_layers_to_wait_for(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver)
    write = engine.submit(pools.plan("write/1", [0]))
    with pytest.raises(UsageError, match="is a write"):
        engine.wait_layer(driver.open_stream(urgent=False), write, 0)
    driver.let()
    await write
    await engine.close()


async def test_what_was_put_on_the_stream_before_an_error_ends_before_the_transfer_settles(pools: Pools) -> None:
    driver = FakeDriver(calls_failing={"copy": {2}})
    driver.hold()
    engine = engine_of(driver)
    bad = engine.submit(pools.load("load/bad", [1], [9]))
    with pytest.raises(TransferFailed):
        engine.wait_layer(driver.open_stream(urgent=False), bad, 3)
    driver.let(2)
    await turns()
    assert not bad.done()
    driver.let()
    with pytest.raises(TransferFailed) as caught:
        await bad
    assert caught.value.layer == 2
    assert "719 (injected)" in caught.value.cause
    assert all(work.done for work in copies(driver))
    await engine.close()


@pytest.mark.parametrize("call", ["record", "wait", "make_event"])
async def test_a_driver_that_fails_anywhere_fails_the_transfer_and_not_the_caller(pools: Pools, call: str) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    engine.follow(driver.make_event(shared=True))
    driver.calls_failing = {call: set(range(1000))}
    transfer = engine.submit(pools.plan("write/1", [0]))
    with pytest.raises(TransferFailed, match="injected"):
        await transfer
    assert engine.statistics().device_to_host.failed == 1
    assert engine.bytes_in_flight == 0
    await engine.close()


async def test_a_gpu_that_is_lost_while_copying_fails_every_open_transfer(pools: Pools) -> None:
    driver = FakeDriver(calls_failing={"synchronize": set(range(1000))})
    engine = engine_of(driver)
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(3)]
    await engine.close()
    assert all(transfer.failed for transfer in transfers)


async def test_a_plan_with_more_layers_than_the_engine_was_made_for_is_refused(pools: Pools) -> None:
    engine = CudaCopyEngine(asyncio.get_running_loop(), FakeDriver(), LAYERS - 1)
    with pytest.raises(UsageError) as caught:
        engine.submit(pools.plan("write/1", [0]))
    assert caught.value.field == "layer_count"
    await engine.close()


async def test_the_number_of_open_transfers_is_bounded_and_the_limit_is_answered(pools: Pools) -> None:
    driver = FakeDriver()
    driver.hold()
    engine = engine_of(driver, transfers_open_max=2)
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(2)]
    with pytest.raises(UsageError) as caught:
        engine.submit(pools.plan("write/2", [2]))
    assert caught.value.field == "transfers_open_max"
    driver.let(2)
    await asyncio.gather(*transfers)
    await engine.close()


async def test_closing_gives_every_stream_event_thread_and_pinned_chunk_back(pools: Pools) -> None:
    threads = own_threads()
    driver = FakeDriver()
    engine = engine_of(driver)
    engine.pin(pools.host)
    for _ in range(3):
        await engine.submit(pools.plan("write/1", [0]))
        await engine.submit(pools.load("load/1", [0], [1]))
    assert driver.registered
    await engine.close()
    assert (driver.streams, driver.events, driver.registered) == ({}, set(), {})
    assert own_threads() == threads


async def test_events_are_used_again_and_not_made_for_every_transfer(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    await engine.submit(pools.load("load/1", [0], [1]))
    made = len(driver.events)
    for _ in range(5):
        await engine.submit(pools.load("load/1", [0], [1]))
    assert len(driver.events) == made
    await engine.close()


async def test_times_are_the_gpus_own(pools: Pools) -> None:
    driver = FakeDriver()
    engine = engine_of(driver)
    await engine.submit(pools.plan("write/1", [0]))
    await engine.submit(pools.plan("write/2", [0]))
    assert engine.statistics().device_to_host.copying_s == pytest.approx(0.002)
    await engine.close()


# --- pinned memory ----------------------------------------------------------------------------------------------------


def large_memory(pages: int = 5) -> PageMemory:
    return PageMemory.anonymous(PoolGeometry("kv", 3, 4096, "bfloat16"), pages)


def test_host_memory_is_pinned_in_chunks_that_cover_it_and_given_back() -> None:
    driver = FakeDriver()
    with large_memory() as memory:
        pinned = Pinned(driver, memory, chunk_bytes=16384)
        starts = [memory.base_address + at for at in (0, 16384, 32768, 49152)]
        assert driver.registered == dict(zip(starts, [16384, 16384, 16384, 12288], strict=True))
        pinned.unpin()
        pinned.unpin()
    assert driver.registered == {}


@pytest.mark.parametrize("failing", range(4))
def test_when_a_chunk_cannot_be_pinned_the_earlier_ones_are_given_back_and_the_error_says_what_to_do(
    failing: int,
) -> None:
    driver = FakeDriver(calls_failing={"register_host": {failing}})
    with large_memory() as memory:
        with pytest.raises(ConfigError) as caught:
            Pinned(driver, memory, chunk_bytes=16384)
        assert driver.registered == {}
        assert caught.value.field == "pools.kv.capacity"
        for told in ("719", "injected", str(memory.size_bytes), f"{failing * 16384} could", "RLIMIT_MEMLOCK"):
            assert told in str(caught.value)
        Pinned(FakeDriver(), memory).unpin()


def test_pinned_memory_stays_mapped_until_it_is_unpinned() -> None:
    memory = large_memory()
    pinned = Pinned(FakeDriver(), memory)
    mapping = memory._map
    assert mapping is not None
    memory.close()
    assert not mapping.closed
    pinned.unpin()
    mapping.close()


async def test_no_piece_reaches_over_the_border_of_two_pinned_chunks() -> None:
    geometry = PoolGeometry("kv", LAYERS, 3000, "bfloat16")
    pools = Pools(geometry, 8)
    driver = FakeDriver()
    engine = engine_of(driver)
    engine.pin(pools.host, chunk_bytes=4096)
    assert len(driver.registered) > 10
    await engine.submit(pools.plan("write/1", [0, 1, 2, 5], [3, 4, 5, 7]))
    pools.expect_host([(0, 3), (1, 4), (2, 5), (5, 7)])
    await engine.submit(pools.load("load/1", [3, 4], [6, 7]))
    assert [pools.device_page(2, slot) for slot in (6, 7)] == [pattern(geometry, 2, slot) for slot in (0, 1)]
    await engine.close()
    pools.close()


# --- jitter -----------------------------------------------------------------------------------------------------------


async def test_jitter_loses_time_after_every_event_and_changes_nothing_else(pools: Pools) -> None:
    driver = FakeDriver()
    jittery = JitteryDriver(driver, bytes_max=64, delay_s=0.0, seed=1)
    engine = engine_of(jittery)
    engine.follow(jittery.make_event(shared=True))
    await engine.submit(pools.plan("write/1", [0, 5]))
    await engine.submit(pools.load("load/1", [0, 5], [8, 9]))
    marks = [entry for entry in driver.log if isinstance(entry, Work) and entry.what in ("record", "wait")]
    assert len(copies(driver)) == 1 + LAYERS + len(marks)
    assert races([entry for entry in driver.log if not _is_jitter(entry, jittery)]) == []
    assert [pools.device_page(1, slot) for slot in (8, 9)] == [pattern(KV, 1, slot) for slot in (0, 5)]
    await engine.close()
    jittery.close()
    assert (driver.registered, driver.streams) == ({}, {})


def _is_jitter(entry: object, jittery: JitteryDriver) -> bool:
    scratch = jittery._scratch.base_address
    return isinstance(entry, Work) and any(address == scratch for address, _ in entry.writes)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", Layout)
async def test_pages_of_a_host_kept_page_by_page_are_gathered_in_the_same_few_calls(layout: Layout) -> None:
    pools = Pools(PoolGeometry("kv", LAYERS, PAGE_BYTES, "bfloat16", parts=2), host_layout=layout)
    driver = FakeDriver()
    engine = engine_of(driver)
    await engine.submit(pools.plan("write/1", [0, 1, 2], [5, 6, 7]))
    assert len(driver.batches) == 1
    pools.expect_host([(0, 5), (1, 6), (2, 7)])
    await engine.submit(pools.load("load/1", [5, 6], [30, 31]))
    assert pools.device_page(3, 31, 1) == pattern(pools.geometry, 3, 1, 1)
    assert engine.statistics().host_to_device.copied_bytes == 2 * PAGE_TOTAL_BYTES
    await engine.close()
    pools.close()
