"""Host pools that workers of one host read in each other's memory: reached, gone, elsewhere, locked for a GPU."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from kvcoord.client.registration import geometries_of, register_of
from kvcoord.config import WorkerConfig
from kvcoord.controller.effects import StartCopy
from kvcoord.domain import OperationId, Reason, Tier
from kvcoord.errors import ConfigError
from kvcoord.memory.driver import Driver
from kvcoord.memory.shared import SharedPages
from kvcoord.memory.shared_device import SharedDevice
from kvcoord.protocol.local import Done, Registered
from kvcoord.runtime import host_memory
from kvcoord.runtime.copies import Copies
from tests.dma.fake_driver import FakeDriver
from tests.dma.happens_before import races
from tests.runtime.test_copies import CUDA, PAGES, device_pages, fill, info_of, read

SHARE = 6
LAYERS = 3
KV = {"name": "kv", "page_bytes": 64, "layers": LAYERS, "parts": 2}


def config_of(rank: int, **copies: object) -> WorkerConfig:
    settings = {
        "group": {"pools": [KV], "tp": 2, "kv_replicas": 2},
        "rank": rank,
        "device_pages": PAGES,
        "host_pages": SHARE,
        "copies": copies,
    }
    return msgspec.convert(settings, WorkerConfig)


class Rank:
    """The copies of one of two ranks that hold the same bytes."""

    def __init__(self, number: int, driver: FakeDriver | None = None, **copies: object) -> None:
        self.number = number
        self.config = config_of(number, **copies)
        self.driver = driver
        self._ends: dict[OperationId, asyncio.Future[Reason | None]] = {}
        self.copies = Copies(self.config, asyncio.get_running_loop(), self._ended, self._make_driver)

    async def follow(self, *reaches: bytes) -> ConfigError | None:
        """Takes what the ranks have said of their memory."""
        done: asyncio.Future[ConfigError | None] = asyncio.get_running_loop().create_future()
        self.copies.follow(dict(enumerate(reaches)), done.set_result)
        return await done

    async def copy(self, name: str, source: Tier, sources: list[int], destinations: list[int]) -> Reason | None:
        end: asyncio.Future[Reason | None] = asyncio.get_running_loop().create_future()
        self._ends[name] = end
        self.copies.start(StartCopy(name, source, (sources,), (destinations,)))
        return await end

    def _ended(self, operation: OperationId, error: Reason | None) -> None:
        self._ends[operation].set_result(error)

    def _make_driver(self, number: int) -> tuple[Driver, Callable[[], None]]:
        assert self.driver is not None
        return self.driver, lambda: None


def planes_of(pages: SharedPages, slot: int) -> list[bytes]:
    return [bytes(pages.memory.view(layer, slot, part)) for layer in range(LAYERS) for part in range(2)]


async def ranks(*layouts: str) -> list[Rank]:
    made = [Rank(number, host_layout=layout) for number, layout in enumerate(layouts)]
    for rank in made:
        await rank.copies.open()
    return made


@pytest.mark.parametrize("layouts", [("layer-first", "layer-first"), ("layer-first", "page-first")])
async def test_pages_go_to_the_memory_of_their_keeper_and_come_from_there_on_every_rank(
    layouts: tuple[str, str],
) -> None:
    made = await ranks(*layouts)
    reaches = [rank.copies.reach for rank in made]
    engines = []
    for rank in made:
        assert await rank.follow(*reaches) is None
        pages = SharedPages.create(geometries_of(info_of(rank.config))[0], PAGES)
        engines.append(pages)
        assert isinstance(rank.copies.register(register_of([pages], info_of(rank.config))), Done)
        for slot in range(4):
            for layer in range(LAYERS):
                for part in range(2):
                    number = 64 * rank.number + 8 * slot + 2 * layer + part
                    pages.memory.view(layer, slot, part)[:] = bytes([number]) * 32
    there = [2, SHARE + 5, 3, SHARE + 0]
    for rank in made:
        assert await rank.copy("write", Tier.DEVICE, [0, 1, 2, 3], there) is None
    moved = [rank.copies.statistics().device_to_host.copied_bytes for rank in made]
    assert moved == [2 * 64 * LAYERS] * 2
    expected = [planes_of(engines[keeper], slot) for slot, keeper in enumerate((0, 1, 0, 1))]
    for rank, pages in zip(made, engines, strict=True):
        assert await rank.copy("load", Tier.HOST, there, [4, 5, 6, 7]) is None
        assert [planes_of(pages, slot) for slot in (4, 5, 6, 7)] == expected
    for rank, pages in zip(made, engines, strict=True):
        await rank.copies.close()
        pages.close()


async def test_a_keeper_that_is_gone_before_it_was_mapped_fails_the_loads_of_its_pages_and_no_others() -> None:
    made = await ranks("layer-first", "layer-first")
    reaches = [rank.copies.reach for rank in made]
    await made[1].copies.close()
    assert await made[0].follow(*reaches) is None
    with SharedPages.create(geometries_of(info_of(made[0].config))[0], PAGES) as pages:
        made[0].copies.register(register_of([pages], info_of(made[0].config)))
        assert await made[0].copy("own", Tier.HOST, [1], [1]) is None
        assert await made[0].copy("both", Tier.HOST, [1, SHARE + 1], [1, 2]) is Reason.SOURCE_GONE
        await made[0].copies.close()


async def test_a_rank_on_another_host_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await ranks("layer-first", "layer-first")
    reach = made[1].copies.reach
    monkeypatch.setattr(host_memory, "_this_host", lambda: "elsewhere")
    error = await made[0].follow(b"", reach)
    assert isinstance(error, ConfigError)
    assert (error.field, error.value) == ("group.kv_replicas", 2)
    assert "rank 1 is on another host" in error.fix
    for rank in made:
        await rank.copies.close()


async def test_the_next_life_of_a_keeper_is_followed_and_its_last_one_let_go() -> None:
    made = await ranks("layer-first", "layer-first")
    reaches = [rank.copies.reach for rank in made]
    for _ in range(2):
        assert await made[0].follow(*reaches) is None
    first = made[0].copies._host._mapped[1][1]
    assert not any(memory.closed for memory in first)
    again = Rank(1)
    await again.copies.open()
    assert await made[0].follow(reaches[0], again.copies.reach) is None
    assert all(memory.closed for memory in first)
    assert not any(memory.closed for memory in made[0].copies._host._mapped[1][1])
    for rank in (*made, again):
        await rank.copies.close()


async def test_a_gpu_copies_from_the_memory_of_other_ranks_which_is_locked_for_it() -> None:
    driver = FakeDriver(seed=5)
    reader, keeper = Rank(0, driver, **CUDA), Rank(1)
    await reader.copies.open()
    await keeper.copies.open()
    own_bytes = sum(driver.registered.values())
    reaches = [reader.copies.reach, keeper.copies.reach]
    assert await reader.follow(*reaches) is None
    assert sum(driver.registered.values()) == 2 * own_bytes == 2 * SHARE * 64 * LAYERS
    keeper.copies._host.own[0].view(1, 4, 1)[:] = b"k" * 32
    (geometry,) = geometries_of(info_of(reader.config))
    pages = device_pages(driver, geometry)
    fill(driver, pages, 0, b"own")
    with SharedDevice(driver, [pages]) as shared:
        assert isinstance(reader.copies.register(register_of(shared, info_of(reader.config), "m")), Registered)
        assert await reader.copy("write", Tier.DEVICE, [0, 1], [SHARE + 1, 2]) is None
        assert await reader.copy("load", Tier.HOST, [SHARE + 4, 2], [5, 6]) is None
        assert read(driver, pages, 5)[3] == b"k" * 32
        assert races(driver.log) == []
        reader.copies.unregister()
    again = Rank(1)
    await again.copies.open()
    assert await reader.follow(reaches[0], again.copies.reach) is None
    assert sum(driver.registered.values()) == 2 * own_bytes
    for rank in (reader, keeper, again):
        await rank.copies.close()
    assert driver.registered == {}
