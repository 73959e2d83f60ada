"""Device memory of an engine, shared with its worker."""

import asyncio

import msgspec
import pytest

import kvcoord
from kvcoord.client.registration import create_pages
from kvcoord.errors import PeerUnavailable, UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedHandle, SharedPages, attach
from kvcoord.protocol.local import (
    Done,
    Failed,
    Memory,
    Register,
)
from tests.client.fake import fake_worker
from tests.client.values import INFO, TWO_POOLS


def seen(memory: Memory, geometry: PoolGeometry) -> PageMemory:
    return attach(SharedHandle(memory.pid, memory.fd, memory.inode, memory.size_bytes, geometry, INFO.device_pages))


async def test_a_registered_engine_and_its_worker_see_the_same_pages(address: str) -> None:
    async with fake_worker(address, TWO_POOLS) as worker:
        async with kvcoord.connect(address) as cache:
            task = asyncio.create_task(cache.register())
            number, call = await worker.expect(Register)
            assert cache.device == []
            worker.answer((number, Done()))
            await task
            assert [memory.pool for memory in call.memory] == ["kv", "index"]
            assert [(pages.geometry.layer_count, pages.geometry.page_bytes) for pages in cache.device] == [
                (3, 64),
                (2, 8),
            ]
            cache.device[0].view(2, 15)[:] = b"x" * 64
            with seen(call.memory[0], cache.device[0].geometry) as pages:
                assert bytes(pages.view(2, 15)) == b"x" * 64
            kept = cache.device[0]
        assert kept.closed
        assert cache.device == []


async def test_pages_of_the_engines_own_stay_its_own(address: str) -> None:
    pages = create_pages(INFO)
    async with fake_worker(address) as worker:
        async with kvcoord.connect(address) as cache:
            wrongs: list[list[SharedPages]] = [[], [*pages, *pages]]
            for wrong in wrongs:
                with pytest.raises(UsageError, match="one SharedPages for each"):
                    await cache.register(wrong)
            task = asyncio.create_task(cache.register(pages))
            number, _ = await worker.expect(Register)
            worker.answer((number, Done()))
            await task
            assert cache.device == [pages[0].memory]
        assert not pages[0].memory.closed
    pages[0].close()


async def test_pages_of_another_shape_are_refused(address: str) -> None:
    other = create_pages(msgspec.structs.replace(INFO, device_pages=8))
    async with fake_worker(address), kvcoord.connect(address) as cache:
        with pytest.raises(UsageError, match="16 device pages"):
            await cache.register(other)
    other[0].close()


async def test_memory_that_the_worker_refuses_is_closed_again(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.register())
        number, call = await worker.expect(Register)
        worker.answer((number, Failed("UsageError", ["session", 2, "another engine is connected"])))
        with pytest.raises(UsageError, match="another engine"):
            await task
        assert cache.device == []
        with pytest.raises(PeerUnavailable):
            seen(call.memory[0], PoolGeometry("kv", 3, 64, "bfloat16"))
