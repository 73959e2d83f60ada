"""A small lockstep engine with an async client, for tests of workers and groups."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import kvcoord
from kvcoord.domain import PageKey
from kvcoord.index.keys import block_page_keys

T = TypeVar("T")

KEYS = block_page_keys([1, 2, 3, 4])


class Engine:
    """One lockstep engine with an async client."""

    def __init__(self, address: str) -> None:
        self._connecting = kvcoord.connect(address)
        self.step = 0

    async def __aenter__(self) -> "Engine":
        self.cache = await self._connecting.__aenter__()
        await self.cache.register()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connecting.__aexit__(None, None, None)

    async def advance(self) -> int:
        """One step. Returns the operations that are open."""
        verdict = await self.cache.advance(self.step)
        self.step += 1
        return verdict.operations_open

    async def settle(self) -> None:
        while await self.advance():
            pass
        await self.advance()
        await self.advance()

    async def store(self, keys: list[PageKey], fill: bytes) -> None:
        """Computes a path and writes it through."""
        lease = await self.cache.acquire(keys)
        for page in range(lease.device_pages + lease.host_pages, len(keys)):
            for layer in range(4):
                self.cache.device[0].view(layer, lease.slots[0][page])[:] = fill * 64
        await lease.write_through(deferred=True)
        await lease.release()

    async def hold_and_release_for_ever(self) -> None:
        """Until a call raises."""
        while True:
            async with await self.cache.acquire(KEYS):
                pass

    async def read(self, keys: list[PageKey]) -> set[bytes]:
        """The bytes of a path, all pages and layers, loaded back where needed."""
        async with await self.cache.acquire(keys) as lease:
            assert lease.device_pages + lease.host_pages == len(keys)
            return {bytes(self.cache.device[0].view(layer, slot)) for layer in range(4) for slot in lease.slots[0]}


async def on_all(*waits: Awaitable[T]) -> list[T]:
    """What each rank gets, in order of rank: calls of lockstep engines are made by all of them at once."""
    return list(await asyncio.gather(*waits))
