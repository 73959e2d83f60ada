"""A hybrid group of real processes and the async client: bytes of pages, windows and states over lives of engines."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvcoord.domain import PageKey, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import NO_SLOT
from tests.runtime.engine import on_all
from tests.runtime.process_group import ProcessGroup
from tests.runtime.test_lives import Named

WINDOW = 2
POOLS = [
    {"name": "kv", "page_bytes": 64, "layers": 4},
    {"name": "window", "page_bytes": 32, "layers": 2, "kind": "window", "window_pages": WINDOW, "device_slots": 8},
    {"name": "state", "page_bytes": 128, "layers": 1, "kind": "state", "device_slots": 4, "host_slots": 6},
]
SHAPES = ((4, 64), (2, 32), (1, 128))
"""Layers and bytes of these."""

PATH = block_page_keys(range(1, 7))


class HybridEngine(Named):
    """Each page has bytes of its own in each pool, made of its key and the rank."""

    async def compute(self, keys: list[PageKey]) -> int:
        """Goes on from what is cached, checking every byte that it goes on from. Returns how many pages that was."""
        async with await self.cache.acquire(keys) as lease:
            cached = lease.device_pages + lease.host_pages
            for number, slots in enumerate(lease.slots):
                for at, slot in enumerate(slots):
                    if slot == NO_SLOT:
                        continue
                    if at < cached:
                        assert self.read_slot(number, slot) == self.bytes_of(keys[at], number), f"{at} in {number}"
                    else:
                        self.fill_slot(number, slot, self.bytes_of(keys[at], number))
            held = [[at for at, slot in enumerate(slots) if slot != NO_SLOT] for slots in lease.slots]
            assert held == [self.ends(cached, len(keys), window) for window in (len(keys), WINDOW, 1)]
            await lease.write_through(deferred=True)
        return cached

    def ends(self, cached: int, pages: int, window: int) -> list[int]:
        """The pages that a lease has slots for in a pool with this window."""
        return sorted({*range(max(0, cached - window), cached), *range(max(cached, pages - window), pages)})

    def read_slot(self, number: int, slot: int) -> list[bytes]:
        return [bytes(self.cache.device[number].view(layer, slot)) for layer in range(SHAPES[number][0])]

    def fill_slot(self, number: int, slot: int, layers: list[bytes]) -> None:
        for layer, content in enumerate(layers):
            self.cache.device[number].view(layer, slot)[:] = content

    def bytes_of(self, key: PageKey, number: int) -> list[bytes]:
        """What a page has in each layer of a pool on this rank."""
        layers, size = SHAPES[number]
        return [bytes([key[0] ^ self.cache.info.rank, number, layer, key[1]]) * (size // 4) for layer in range(layers)]


@asynccontextmanager
async def engines(group: ProcessGroup) -> AsyncIterator[list[HybridEngine]]:
    """One for each rank, after its first step."""
    async with AsyncExitStack() as stack:
        addresses = [group.address(rank) for rank in range(group.group.world_size)]
        made = [HybridEngine(address) for address in addresses]
        for engine in made:
            await stack.enter_async_context(engine)
        await on_all(*(engine.advance() for engine in made))
        yield made


async def next_life(group: ProcessGroup, former: list[str]) -> None:
    """The workers have noticed that the engines of these incarnations are gone, and are together again."""
    while True:
        seen = [await group.status(rank) for rank in range(group.group.world_size)]
        new = all(snapshot.incarnation != before for snapshot, before in zip(seen, former, strict=True))
        if new and {snapshot.state for snapshot in seen} == {"active"} and len({each.epoch for each in seen}) == 1:
            return


async def turn(made: list[HybridEngine], pages: int) -> set[int]:
    """A request for the first pages of the path, from beginning to end. Returns what each rank found cached."""
    found = await on_all(*(engine.compute(PATH[:pages]) for engine in made))
    await on_all(*(engine.settle() for engine in made))
    return set(found)


@pytest.mark.parametrize("pp", [1, 2])
async def test_a_conversation_goes_on_from_windows_and_states_on_both_tiers_and_in_the_next_life(
    tmp_path: Path, pp: int
) -> None:
    async with ProcessGroup(tmp_path, 2, pools=POOLS, pp=pp) as group:
        async with engines(group) as made:
            assert [await turn(made, pages) for pages in (3, 4, 4, 2)] == [{0}, {3}, {4}, {0}]
            await on_all(*(engine.cache.evict(Tier.DEVICE, len(PATH)) for engine in made))
            assert await turn(made, 6) == {4}, "loaded back, window and state too"
            former = [(await group.status(rank)).incarnation for rank in range(2)]
        await next_life(group, former)
        async with engines(group) as made:
            assert await turn(made, 6) == {6}, "from the host, in the next life of the engine"
            for rank in range(2):
                snapshot = await group.status(rank)
                assert (snapshot.leases_open, snapshot.operations_open) == (0, 0)
                assert all(pool.free + pool.cached == pool.capacity for pool in snapshot.pools)
                cached = {pool.name: pool.cached for pool in snapshot.pools if pool.tier is Tier.HOST}
                assert cached == {"kv": 6, "window": 6, "state": 4}
