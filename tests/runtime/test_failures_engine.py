"""Engines are killed, and callers give up: the worker cleans up after them, and the others are told."""

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path

import pytest

from kvcoord.domain import Committed, PageKey, Tier
from kvcoord.errors import GroupRenewed
from kvcoord.index.keys import block_page_keys
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.process_group import ProcessGroup
from tests.runtime.test_failures_worker import (
    advance_for_ever,
    begin_again,
    engines,
    nothing_leaks,
    store_and_read_back,
)

ENGINE = """
import sys, kvcoord
with kvcoord.connect_blocking(sys.argv[1]) as cache:
    cache.register()
    cache.advance(0)
    lease = cache.acquire([bytes([number]) * 16 for number in range(4)], landed=False)
    cache.write_lease(lease)
    print("here", flush=True)
    for step in range(1, 1000):
        cache.advance(step)
"""
"""Holds a lease and has a write under way when it is killed."""


async def test_an_engine_that_is_killed_leaves_no_page_behind_and_the_others_begin_anew(tmp_path: Path) -> None:
    keys = [bytes([number]) * 16 for number in range(4)]
    async with ProcessGroup(tmp_path, 2) as group, Engine(group.address(0)) as survivor:
        engine = await group.children.start("engine", ["-c", ENGINE, group.address(1)], generation=1)
        await survivor.advance()
        lease = await survivor.cache.acquire(keys)
        await lease.write_through(deferred=True)
        await engine.hear()
        await engine.kill()
        with pytest.raises(GroupRenewed):
            await advance_for_ever(survivor)
        await begin_again(survivor)
        async with Engine(group.address(1)) as again:
            await on_all(survivor.advance(), again.advance())
            await store_and_read_back([survivor, again])
            await nothing_leaks(group)


async def test_callers_that_give_up_at_any_moment_once_or_twice_leave_nothing_behind(tmp_path: Path) -> None:
    """Without lockstep every engine may give up for itself: what was begun ends on all ranks all the same."""
    rng = random.Random(11)
    slots = [[0, 1, 2]]

    async def give_up(call: Coroutine[object, object, object]) -> None:
        """Stops to wait after some turns of the event loop, and says so twice."""
        task = asyncio.ensure_future(call)
        for _ in range(rng.choice((0, 1, 5, 20, 100))):
            await asyncio.sleep(0)
        task.cancel()
        task.cancel()
        await asyncio.wait([task])

    async def write_and_load(engine: Engine, number: int) -> None:
        keys = block_page_keys([number, number + 1, number + 2])
        await give_up(engine.cache.write_through(keys, slots, operation=f"w{number}"))
        await give_up(_load(engine, keys, slots, f"l{number}"))

    group = ProcessGroup(tmp_path, 2, lockstep=False).limit(vote_timeout_s=2.0)
    async with group, engines(group) as made:
        for number in range(0, 90, 3):
            await on_all(*(write_and_load(engine, number) for engine in made))
        for rank in range(2):
            await group.until(rank, lambda snapshot: not snapshot.operations_open)
        await nothing_leaks(group)
        assert await on_all(*(engine.cache.agree("own/1", True) for engine in made))


async def _load(engine: Engine, keys: list[PageKey], slots: list[list[int]], operation: str) -> None:
    await (await engine.cache.load_back(keys, slots, operation=operation))


async def test_a_vote_stands_when_its_caller_gives_up(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2) as group, engines(group) as (a, b):
        waiting = asyncio.ensure_future(a.cache.agree("own/1", True))
        await group.voting()
        waiting.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert isinstance(await b.cache.agree("own/1", True), Committed)
        await store_and_read_back([a, b])


async def test_an_engine_that_loads_when_it_is_killed_leaves_the_host_pages_unpinned(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 1) as group:
        await group.kill("r0")
        await group.worker(0, copy_faults={"delay_s": 0.2})
        async with Engine(group.address(0)) as engine:
            await engine.advance()
            await engine.store(KEYS, b"x")
            await engine.settle()
            await engine.cache.evict(Tier.DEVICE, 4)
            lease = await engine.cache.acquire(KEYS, landed=False)
            assert lease.loaded
        async with Engine(group.address(0)) as again:
            await again.advance()
            await store_and_read_back([again], block_page_keys([7, 8, 9, 10]))
            await nothing_leaks(group)
