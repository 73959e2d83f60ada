"""A worker's copies: on this host, on a GPU's driver without a GPU, with other layouts, and with pools left out."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvcoord.client.registration import adopt, geometries_of, register_of
from kvcoord.config import GroupConfig, WorkerConfig, group_fingerprint
from kvcoord.controller.effects import StartCopy
from kvcoord.domain import OperationId, Reason, Tier
from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.memory.device import DevicePages
from kvcoord.memory.driver import Driver
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.numa import Placement
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedPages
from kvcoord.memory.shared_device import SharedDevice
from kvcoord.protocol.local import Done, Opened, Registered
from kvcoord.runtime import copy_engine
from kvcoord.runtime.copies import Copies
from tests.dma.fake_driver import FakeDriver
from tests.dma.happens_before import races
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.groups import group

PAGES = 8
KV = {"name": "kv", "page_bytes": 64, "layers": 3, "parts": 2}
DRAFT = {"name": "draft", "page_bytes": 32, "layers": 1, "stage_layers": [0, 1]}


def config_of(rank: int = 0, **options: object) -> WorkerConfig:
    settings = {
        "group": {"pools": [KV], **({"pools": [KV, DRAFT], "pp": 2} if rank else {})},
        "rank": rank,
        "device_pages": PAGES,
        "host_pages": PAGES,
        **options,
    }
    return msgspec.convert(settings, WorkerConfig)


def info_of(config: WorkerConfig) -> Opened:
    pools = config.group.pools
    layers = [pool.layers_of_stage(config.group.stage(config.rank)) for pool in pools]
    columns = [[getattr(pool, field) for pool in pools] for field in ("name", "page_bytes", "dtype", "parts")]
    names, sizes, dtypes, parts = columns
    return Opened("g", config.rank, 1, 1, names, sizes, layers, dtypes, PAGES, PAGES, 16, True, parts)


class Sidecar:
    """Copies, and what was said of their ends."""

    def __init__(self, config: WorkerConfig, driver: FakeDriver | None = None) -> None:
        self.ends: dict[OperationId, asyncio.Future[Reason | None]] = {}
        self.closed = 0
        self._driver = driver
        self.copies = Copies(config, asyncio.get_running_loop(), self._ended, self._make_driver)

    async def copy(self, name: str, source: Tier, source_slot: int, destination_slot: int) -> Reason | None:
        """One page, in every pool."""
        pools = len(self.copies._config.group.pools)
        self.copies.start(StartCopy(name, source, ([source_slot],) * pools, ([destination_slot],) * pools))
        return await self.ends.setdefault(name, asyncio.get_running_loop().create_future())

    def _ended(self, operation: OperationId, error: Reason | None) -> None:
        self.ends.setdefault(operation, asyncio.get_running_loop().create_future()).set_result(error)

    def _make_driver(self, number: int) -> tuple[Driver, Callable[[], None]]:
        if self._driver is None:
            raise ConfigError("copies.cuda_device", number, "there is none")

        def close() -> None:
            self.closed += 1

        return self._driver, close


def device_pages(driver: FakeDriver, geometry: PoolGeometry) -> DevicePages:
    """An engine's tensors: one for each part of each layer."""
    planes = [driver.allocate(PAGES * geometry.plane_bytes) for _ in range(geometry.plane_count)]
    return DevicePages(driver, geometry, PAGES, planes)


def fill(driver: FakeDriver, pages: DevicePages, slot: int, text: bytes) -> None:
    for number, plane in enumerate(pages.planes):
        start = slot * pages.slot_stride
        content = (text + bytes([number]) + text * 64)[: pages.geometry.plane_bytes]
        driver._memory[plane][start : start + len(content)] = content


def read(driver: FakeDriver, pages: DevicePages, slot: int) -> list[bytes]:
    start, size = slot * pages.slot_stride, pages.geometry.plane_bytes
    return [driver._memory[plane][start : start + size] for plane in pages.planes]


CUDA = {"engine": "cuda"}


async def test_a_gpus_pages_go_to_pinned_host_memory_and_back_ordered_by_the_engines_events() -> None:
    driver = FakeDriver(seed=3)
    config = config_of(copies={**CUDA, "host_layout": "page-first", "checksums": True})
    sidecar = Sidecar(config, driver)
    await sidecar.copies.open()
    assert sum(driver.registered.values()) == PAGES * 64 * 3
    (geometry,) = geometries_of(info_of(config))
    pages = device_pages(driver, geometry)
    computing = driver.open_stream(urgent=False)
    with SharedDevice(driver, [pages]) as shared:
        answer = sidecar.copies.register(register_of(shared, info_of(config), "m"))
        assert isinstance(answer, Registered)
        adopt(shared, answer)
        plane_ranges = [(plane, PAGES * geometry.plane_bytes) for plane in pages.planes]
        driver.kernel(computing, writes=plane_ranges, act=lambda: fill(driver, pages, 2, b"two"))
        shared.computed(computing)
        assert await sidecar.copy("write/1", Tier.DEVICE, 2, 5) is None
        shared.wait_written(computing)
        driver.kernel(computing, writes=plane_ranges, act=lambda: fill(driver, pages, 2, b"gone"))
        shared.computed(computing)
        assert await sidecar.copy("load/1", Tier.HOST, 5, 7) is None
        for layer in range(3):
            shared.wait_layer(computing, layer)
        driver.kernel(computing, reads=plane_ranges)
        expected = read(driver, pages, 7)
        fill(driver, pages, 0, b"two")
        assert expected == read(driver, pages, 0)
        assert races(driver.log) == []
        sidecar.copies.unregister()
        assert driver.opened == []
        assert await sidecar.copy("write/2", Tier.DEVICE, 2, 5) is Reason.SOURCE_GONE
    await sidecar.copies.close()
    assert driver.registered == {}
    assert set(driver.streams) == {computing}
    assert sidecar.closed == 1


async def test_a_page_that_changed_on_the_host_is_a_failed_copy() -> None:
    config = config_of(copies={"checksums": True})
    sidecar = Sidecar(config)
    await sidecar.copies.open()
    with SharedPages.create(geometries_of(info_of(config))[0], PAGES) as pages:
        assert isinstance(sidecar.copies.register(register_of([pages], info_of(config))), Done)
        assert await sidecar.copy("write/1", Tier.DEVICE, 2, 5) is None
        assert await sidecar.copy("load/1", Tier.HOST, 5, 3) is None
        sidecar.copies._host.own[0].view(2, 5, 1)[0] ^= 1
        assert await sidecar.copy("load/2", Tier.HOST, 5, 3) is Reason.COPY_FAILED
        await sidecar.copies.close()


@pytest.mark.parametrize("failing", ["register_host", "make_event"])
async def test_a_gpu_that_cannot_be_used_ends_the_worker_before_it_joins_and_gives_everything_back(
    failing: str,
) -> None:
    driver = FakeDriver(calls_failing={failing: {0}})
    sidecar = Sidecar(config_of(copies=CUDA), driver)
    with pytest.raises(ConfigError, match="719"):
        await sidecar.copies.open()
    assert (driver.registered, sidecar.closed) == ({}, 1)
    await sidecar.copies.close()


async def test_host_pools_are_placed_on_the_gpus_node_before_the_driver_touches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    placed: list[tuple[int, int, int]] = []
    monkeypatch.setattr(copy_engine, "placement", lambda asked, bus_id: Placement(1, bus_id))
    monkeypatch.setattr(
        copy_engine, "prefer", lambda memory, node: placed.append((memory.size_bytes, node, len(driver.registered)))
    )
    sidecar = Sidecar(config_of(copies=CUDA), driver)
    await sidecar.copies.open()
    assert placed == [(PAGES * 64 * 3, 1, 0)]
    await sidecar.copies.close()


async def test_a_host_that_forbids_placing_memory_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: PageMemory, node: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(copy_engine, "placement", lambda asked, bus_id: Placement(1, ""))
    monkeypatch.setattr(copy_engine, "prefer", refuse)
    sidecar = Sidecar(config_of())
    await sidecar.copies.open()
    assert "Operation not permitted" in caplog.text
    await sidecar.copies.close()


@pytest.mark.parametrize("copies", [{}, CUDA])
async def test_a_numa_node_that_the_host_does_not_have_ends_the_worker_before_it_joins(
    copies: dict[str, object],
) -> None:
    driver = FakeDriver()
    sidecar = Sidecar(config_of(copies={**copies, "numa_node": 4095}), driver)
    with pytest.raises(ConfigError, match="numa_node"):
        await sidecar.copies.open()
    assert (driver.registered, driver.streams, driver.events) == ({}, {}, set())
    await sidecar.copies.close()


async def test_jitter_is_put_between_the_copies_and_the_gpu() -> None:
    driver = FakeDriver()
    sidecar = Sidecar(config_of(copies=CUDA, copy_faults={"jitter_bytes_max": 64, "seed": 1}), driver)
    await sidecar.copies.open()
    assert len(driver.registered) == 2
    await sidecar.copies.close()
    assert (driver.registered, driver.streams, driver.events, driver._memory) == ({}, {}, set(), {})


async def test_memory_of_the_wrong_kind_is_refused_with_the_option_to_set() -> None:
    driver = FakeDriver()
    on_gpu, on_cpu = Sidecar(config_of(copies=CUDA), driver), Sidecar(config_of())
    info = info_of(config_of())
    (geometry,) = geometries_of(info)
    with SharedPages.create(geometry, PAGES) as pages, SharedDevice(driver, [device_pages(driver, geometry)]) as device:
        for sidecar, memory in ((on_gpu, [pages]), (on_cpu, device)):
            await sidecar.copies.open()
            with pytest.raises(UsageError):
                sidecar.copies.register(register_of(memory, info))
            await sidecar.copies.close()
        with pytest.raises(UsageError, match=r"copies\.engine=cuda"):
            adopt(device, None)


async def test_an_engine_that_died_while_it_registered_leaves_nothing_mapped() -> None:
    driver = FakeDriver()
    sidecar = Sidecar(config_of(copies=CUDA), driver)
    await sidecar.copies.open()
    info = info_of(config_of())
    with SharedDevice(driver, [device_pages(driver, geometries_of(info)[0])]) as device:
        call = register_of(device, info)
    with pytest.raises(PeerUnavailable):
        sidecar.copies.register(call)
    assert driver.opened == []
    await sidecar.copies.close()


def test_an_engine_waits_for_nothing_before_it_knows_the_sidecars_events() -> None:
    driver = FakeDriver()
    device = SharedDevice(driver, [device_pages(driver, PoolGeometry("kv", 1, 8, "int8"))])
    stream = driver.open_stream(urgent=False)
    with pytest.raises(UsageError):
        device.wait_layer(stream, 0)
    with pytest.raises(UsageError):
        device.wait_written(stream)
    device.close()
    device.close()
    with pytest.raises(UsageError):
        device.handles()
    assert driver.events == set()


async def test_a_stage_without_a_layer_of_a_pool_copies_the_others(tmp_path: Path) -> None:
    pools = [
        {"name": "kv", "page_bytes": 64, "layers": 4},
        {"name": "draft", "page_bytes": 32, "layers": 1, "stage_layers": [0, 2]},
    ]
    async with (
        group(tmp_path, pp=2, pools=pools) as made,
        Engine(made.address(0)) as first,
        Engine(made.address(1)) as second,
    ):
        assert [info.layers for info in (first.cache.info, second.cache.info)] == [[4, 0], [4, 2]]
        assert [len(engine.cache.device) for engine in (first, second)] == [1, 2]
        both = (first, second)
        await on_all(*(engine.advance() for engine in both))
        await on_all(*(engine.store(KEYS, b"p") for engine in both))
        await on_all(*(engine.settle() for engine in both))
        await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in both))
        assert await on_all(*(engine.read(KEYS) for engine in both)) == [{b"p" * 64}] * 2
        await on_all(*(engine.settle() for engine in both))


def test_layers_of_the_stages_are_part_of_what_all_ranks_must_have_in_common() -> None:
    config = msgspec.convert({"pp": 2, "pools": [KV, DRAFT]}, GroupConfig)
    fields = group_fingerprint(config)
    assert (fields["pools.kv.parts"], fields["pools.draft.stage_layers"]) == (2, "0,1")
