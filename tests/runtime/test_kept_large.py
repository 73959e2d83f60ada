"""What the ranks agreed to keep may be longer than one message: no recovery is to need all of it in one."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvcoord.config import Limits
from kvcoord.domain import Tier
from kvcoord.index.keys import block_page_keys
from tests.runtime.engine import on_all
from tests.runtime.groups import Group, group
from tests.runtime.test_lives import Named, lives

MESSAGE_BYTES = 8192
PATH_PAGES = 16
PATHS = [block_page_keys([1000 * path + page for page in range(PATH_PAGES)]) for path in range(64)]
"""Their keys are twice as long as a message."""


async def store(engines: list[Named]) -> None:
    for keys in PATHS:
        await on_all(*(engine.store(keys, b"a") for engine in engines))
        await on_all(*(engine.settle() for engine in engines))
    await on_all(*(engine.cache.evict(Tier.DEVICE, 32) for engine in engines))


async def found(engines: list[Named]) -> list[int]:
    """Pages of all paths that each rank finds on the host."""
    by_path = [await on_all(*(engine.cache.match(keys) for engine in engines)) for keys in PATHS]
    return [sum(match.host_pages for match in by_rank) for by_rank in zip(*by_path, strict=True)]


async def recovered(made: Group, engines: list[Named]) -> None:
    """The coordinator is lost with all it knows, and the group agrees again."""
    await made.restart_coordinator()
    for _ in range(3):
        await on_all(*(engine.advance() for engine in engines))


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_coordinator_is_lost_after_more_was_kept_than_a_message_holds(tmp_path: Path, replicas: int) -> None:
    limits = Limits(message_bytes_max=MESSAGE_BYTES, pages_per_operation_max=64)
    pages = PATH_PAGES * len(PATHS)
    async with group(tmp_path, {"host_pages": 1024}, limits, world_size=2, kv_replicas=replicas) as made:
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, ["model@1"] * 2)
            await store(engines)
            assert await found(engines) == [pages] * 2
        await made.lives_over(1)
        async with AsyncExitStack() as stack:
            engines = await lives(made, stack, ["model@1"] * 2)
            assert await found(engines) == [pages] * 2
            await asyncio.wait_for(recovered(made, engines), 60)
            assert await found(engines) == [pages] * 2
