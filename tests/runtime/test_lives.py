"""Engines and sidecars end and begin, in both orders: clean errors, nothing left behind, and the host tier is warm."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvcoord.domain import Tier
from kvcoord.errors import PeerUnavailable
from kvcoord.index.keys import block_page_keys
from tests.leaks import grows, open_files
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.groups import Group, group
from tests.runtime.process_group import ProcessGroup

LIVES = 20
KILLS = 20

ENGINE = """
import asyncio, sys
from tests.runtime.engine import KEYS
from tests.runtime.test_lives import Named

async def live():
    async with Named(sys.argv[1]) as engine:
        await engine.advance()
        print((await engine.cache.match(KEYS)).host_pages, flush=True)
        await engine.store(KEYS, b"k")
        await engine.settle()
        print(*(await engine.read(KEYS)), flush=True)
        await engine.store([*KEYS[:2], *([bytes(16)] * 3)], b"x")
        await asyncio.sleep(3600)

asyncio.run(live())
"""
"""Says what it finds of an earlier life, leaves bytes, and is killed with a lease written but not settled."""


class Named(Engine):
    """An engine that says of which model it is."""

    def __init__(self, address: str, model: str = "model@1") -> None:
        super().__init__(address)
        self._model = model

    async def __aenter__(self) -> "Named":
        self.cache = await self._connecting.__aenter__()
        await self.cache.register(model=self._model)
        return self


async def lives(made: Group, stack: AsyncExitStack, models: Sequence[str]) -> list[Named]:
    """An engine for each rank, after its first step."""
    engines = [await stack.enter_async_context(Named(made.address(rank), name)) for rank, name in enumerate(models)]
    await on_all(*(engine.advance() for engine in engines))
    return engines


def shared_memory() -> list[str]:
    """What this process has open or mapped of kvcoord's shared memory, and names of it on this host.

    Other threads and other processes open and close what is theirs meanwhile: that does not count.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [name for name in [*open_files(), *maps] if "memfd:kvcoord" in name]
    return sorted([*shared, *(name for name in os.listdir("/dev/shm") if "kvcoord" in name)])


async def test_the_host_tier_outlives_its_engines_and_its_bytes_are_right(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made:
        files: list[int] = []
        before = shared_memory()
        for life in range(LIVES):
            async with AsyncExitStack() as stack:
                engines = await lives(made, stack, ["model@1"] * 2)
                found = [match.host_pages for match in await on_all(*(e.cache.match(KEYS) for e in engines))]
                assert found == ([len(KEYS)] * 2 if life else [0, 0])
                await on_all(*(engine.store(KEYS, fill) for engine, fill in zip(engines, (b"a", b"b"), strict=True)))
                await on_all(*(engine.settle() for engine in engines))
                assert await on_all(*(engine.read(KEYS) for engine in engines)) == [{b"a" * 64}, {b"b" * 64}]
                await on_all(*(engine.settle() for engine in engines))
            await made.lives_over(life + 1)
            files.append(len(open_files()))
            assert shared_memory() == before
        assert not grows(files)
        for rank, worker in enumerate(made.workers):
            assert made.lives_ended.count(rank) == LIVES
            pool = worker.machine.cache.state.pools.host[0]
            assert (pool.used_count, pool.free_count) == (len(KEYS), 64 - len(KEYS))


@pytest.mark.parametrize("models", [["model@2", "model@2"], ["", ""]])
async def test_an_engine_of_another_model_finds_nothing_of_the_former(tmp_path: Path, models: list[str]) -> None:
    async with group(tmp_path, world_size=2) as made:
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, ["model@1"] * 2)
            await on_all(*(engine.store(KEYS, b"a") for engine in engines))
            await on_all(*(engine.settle() for engine in engines))
        await made.lives_over(1)
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, models)
            assert [m.host_pages for m in await on_all(*(e.cache.match(KEYS) for e in engines))] == [0, 0]


async def test_a_rank_that_lost_its_sidecar_empties_the_host_tier_of_all(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made:
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, ["model@1"] * 2)
            await on_all(*(engine.store(KEYS, b"a") for engine in engines))
            await on_all(*(engine.settle() for engine in engines))
        await made.lives_over(1)
        await made.workers.pop().close()
        await made.worker(1)
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, ["model@1"] * 2)
            assert [m.host_pages for m in await on_all(*(e.cache.match(KEYS) for e in engines))] == [0, 0]
            await on_all(*(engine.store(KEYS, b"c") for engine in engines))
            await on_all(*(engine.settle() for engine in engines))
            assert await on_all(*(engine.read(KEYS) for engine in engines)) == [{b"c" * 64}] * 2


async def test_engines_and_sidecars_are_killed_by_turns_and_nothing_is_left(tmp_path: Path) -> None:
    before = shared_memory()
    async with ProcessGroup(tmp_path, 1) as made:
        warm = False
        for life in range(KILLS):
            engine = await made.children.start("engine", ["-c", ENGINE, made.address(0)], generation=life)
            assert int(await engine.hear()) == (len(KEYS) if warm else 0)
            assert (await engine.hear()).decode().strip() == repr(b"k" * 64)
            if life % 2:
                await made.kill("r0")
                await engine.kill()
                await made.worker(0)
                warm = False
            else:
                await engine.kill()
                warm = True
        snapshot = await made.until(0, lambda seen: not seen.leases_open)
        assert snapshot.operations_open == 0
    assert shared_memory() == before


async def test_a_sidecar_that_is_killed_is_a_clean_error_for_its_engine(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 1) as made:
        before = shared_memory()
        for _ in range(KILLS):
            async with Named(made.address(0)) as engine:
                await engine.advance()
                await engine.store(block_page_keys([7, 8]), b"z")
                waiting = asyncio.ensure_future(engine.hold_and_release_for_ever())
                await made.kill("r0")
                with pytest.raises(PeerUnavailable):
                    await waiting
                with pytest.raises(PeerUnavailable):
                    await engine.cache.evict(Tier.HOST, 1)
            await made.worker(0)
            assert shared_memory() == before
