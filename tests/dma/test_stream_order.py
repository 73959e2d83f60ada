"""Every order between the engine's stream, the copy streams and the host is kept by a wait, and each wait is needed."""

import asyncio
from collections.abc import Sequence

import pytest

from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.memory.driver import Stream
from kvcoord.memory.pages import PageMemory
from tests.dma.fake_driver import Entry, FakeDriver, HostAccess, Range, Seen, Work
from tests.dma.happens_before import races
from tests.dma.pools import LAYERS, PAGE_BYTES, Pools


def ranges(memory: PageMemory, slots: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> list[Range]:
    return [(memory.address(layer, slot), PAGE_BYTES) for layer in layers for slot in slots]


class Story:
    """An engine that computes, lets pages be written out, reuses them, and has others loaded and reads them."""

    def __init__(self, pools: Pools, driver: FakeDriver) -> None:
        self.pools, self.driver = pools, driver
        self.engine = CudaCopyEngine(asyncio.get_running_loop(), driver, LAYERS)
        self.computing = driver.open_stream(urgent=False)
        self.reading = driver.open_stream(urgent=False)
        self.prefilling = driver.open_stream(urgent=False)
        self.computed = driver.make_event(shared=True)
        self.prefilled = driver.make_event(shared=True)
        self.engine.follow(self.computed)

    async def play(self) -> list[Entry]:
        """Returns what was asked of the driver, up to the end of the last copy."""
        device, host, driver, engine = self.pools.device, self.pools.host, self.driver, self.engine
        driver.hold()
        driver.kernel(self.computing, writes=ranges(device, [0, 1, 2]))
        driver.record(self.computed, self.computing)
        write = engine.submit(self.pools.plan("write/1", [0, 1, 2], [4, 5, 6]))
        engine.wait_written(self.computing)
        driver.kernel(self.computing, writes=ranges(device, [0, 1, 2]))
        driver.let()
        await write
        driver.host(reads=ranges(host, [4, 5, 6]))

        driver.kernel(self.computing, reads=ranges(device, [10, 11, 12]))
        driver.record(self.computed, self.computing)
        load = engine.submit(self.load("load/1", [4, 5, 6], [10, 11, 12]))
        for layer in range(LAYERS):
            engine.wait_layer(self.computing, load, layer)
            driver.kernel(self.computing, reads=ranges(device, [10, 11, 12], [layer]))
        await self.read_as_it_lands(load, device)
        await load
        driver.kernel(self.prefilling, writes=ranges(device, [20]))
        driver.record(self.prefilled, self.prefilling)
        engine.follow(self.prefilled)
        last = engine.submit(self.pools.plan("write/2", [20], [5]))
        driver.let()
        await last
        log = list(driver.log)
        await engine.close()
        return log

    async def read_as_it_lands(self, load: object, device: PageMemory) -> None:
        """A second reader that knows the layers from the awaitable, not from an event."""
        transfer = self.engine._lanes[Direction.HOST_TO_DEVICE].jobs[0].transfer
        assert transfer is load
        for layer in range(LAYERS):
            waiting = asyncio.ensure_future(transfer.layer(layer))
            await asyncio.sleep(0)
            self.driver.let()
            await waiting
            self.driver.kernel(self.reading, reads=ranges(device, [10, 11, 12], [layer]))
        self.driver.let()

    def load(self, name: str, host_slots: list[int], device_slots: list[int]) -> CopyPlan:
        copy = PoolCopy(self.pools.host, self.pools.device, host_slots, device_slots)
        return CopyPlan(name, Direction.HOST_TO_DEVICE, (copy,))


def waits(log: Sequence[Entry]) -> list[int]:
    return [at for at, entry in enumerate(log) if isinstance(entry, Seen) or entry_waits(entry)]


def entry_waits(entry: Entry) -> bool:
    return isinstance(entry, Work) and entry.what == "wait"


async def test_nothing_that_touches_the_same_bytes_is_left_unordered(pools: Pools) -> None:
    log = await Story(pools, FakeDriver()).play()
    assert races(log) == []


async def test_every_single_wait_is_needed_and_the_checker_sees_it_missing(pools: Pools) -> None:
    log = await Story(pools, FakeDriver()).play()
    last = max(at for at, entry in enumerate(log) if isinstance(entry, Work) and entry.what == "copy")
    needed = [at for at in waits(log) if at < last]
    kinds = [log[at] for at in needed]
    assert sum(isinstance(entry, Seen) for entry in kinds) == 1 + LAYERS
    assert sum(entry_waits(entry) for entry in kinds) == 3 + 1 + LAYERS
    unnoticed = [log[at] for at in needed if not races([*log[:at], *log[at + 1 :]])]
    assert unnoticed == []


async def test_a_wait_for_another_event_or_before_its_record_is_no_wait(pools: Pools) -> None:
    driver = FakeDriver()
    engine = CudaCopyEngine(asyncio.get_running_loop(), driver, LAYERS)
    computing = driver.open_stream(urgent=False)
    computed = driver.make_event(shared=True)
    engine.follow(computed)
    transfer = engine.submit(pools.plan("write/1", [0]))
    driver.kernel(computing, writes=ranges(pools.device, [0]))
    driver.record(computed, computing)
    assert len(races(driver.log)) == 1
    await transfer
    await engine.close()


@pytest.mark.parametrize("seed", range(20))
async def test_the_bytes_are_right_in_every_order_that_the_waits_allow(pools: Pools, seed: int) -> None:
    assert await corrupted(pools, FakeDriver(seed=seed)) == 0


async def test_without_a_wait_some_order_corrupts_bytes() -> None:
    for missing in (0, 1):
        wrong = 0
        for seed in range(20):
            wrong += await corrupted(Pools(), FakeDriver(seed=seed, waits_ignored={missing}))
        assert wrong > 0


async def corrupted(pools: Pools, driver: FakeDriver) -> int:
    """Writes pages out while the engine overwrites them right before and right after. Returns how many differ."""
    engine = CudaCopyEngine(asyncio.get_running_loop(), driver, LAYERS)
    computing = driver.open_stream(urgent=False)
    computed = driver.make_event(shared=True)
    engine.follow(computed)
    fill(driver, computing, pools, b"new")
    driver.record(computed, computing)
    transfer = engine.submit(pools.plan("write/1", [0, 1]))
    engine.wait_written(computing)
    fill(driver, computing, pools, b"reused")
    driver.finish(computing)
    await transfer
    wrong = sum(bytes(pools.host.view(layer, slot)[:6]) != b"newnew" for layer in range(LAYERS) for slot in range(2))
    await engine.close()
    return wrong


def fill(driver: FakeDriver, stream: Stream, pools: Pools, text: bytes) -> None:
    content = (text * PAGE_BYTES)[:PAGE_BYTES]

    def write() -> None:
        for layer in range(LAYERS):
            for slot in range(2):
                pools.device.view(layer, slot)[:] = content

    driver.kernel(stream, writes=ranges(pools.device, [0, 1]), act=write)


def test_the_host_itself_is_ordered_only_by_what_it_has_seen(pools: Pools) -> None:
    driver = FakeDriver()
    stream = driver.open_stream(urgent=False)
    event = driver.make_event(shared=False)
    driver.kernel(stream, writes=ranges(pools.device, [0]))
    driver.record(event, stream)
    driver.host(reads=ranges(pools.device, [0]))
    [(kernel, access)] = races(driver.log)
    assert isinstance(kernel, Work)
    assert isinstance(access, HostAccess)
    driver.log.pop()
    driver.synchronize(event)
    driver.host(reads=ranges(pools.device, [0]))
    driver.kernel(stream, writes=ranges(pools.device, [0]))
    assert races(driver.log) == []
