"""Ranks that hold the same bytes and keep each host page once: how much, what comes back, who dies."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcoord.domain import Aborted, PageKey, Reason, Tier
from kvcoord.errors import GroupRenewed, PeerUnavailable
from kvcoord.index.keys import block_page_keys
from kvcoord.observability.snapshot import CoordinatorSnapshot, PoolSnapshot, WorkerSnapshot
from kvcoord.runtime.status import ask
from tests.runtime.engine import on_all
from tests.runtime.process_group import ProcessGroup
from tests.runtime.test_failures_worker import advance_for_ever, nothing_leaks, suspended
from tests.runtime.test_lives import Named

LAYERS, PLANE_BYTES = 4, 64
PAGE_BYTES = LAYERS * PLANE_BYTES
PATH_PAGES = 4
SHARE = 16
"""Host pages of each rank."""

PATHS = [block_page_keys([100 * path + page for page in range(PATH_PAGES)]) for path in range(8)]


def replicated(folder: Path, ranks: int, **group: Any) -> ProcessGroup:
    made = ProcessGroup(folder, ranks, **({"kv_replicas": ranks} | group))
    for rank in range(ranks):
        made.equip(rank, host_pages=SHARE)
    return made


async def connected(group: ProcessGroup, stack: AsyncExitStack) -> list[Named]:
    made = [await stack.enter_async_context(Named(group.address(rank))) for rank in range(group.group.world_size)]
    await on_all(*(engine.advance() for engine in made))
    return made


def fill_of(rank: int, path: int) -> bytes:
    """Ranks differ on purpose, so that it shows whose copy of a page comes back."""
    return bytes([16 * (rank + 1) + path])


async def store(made: list[Named]) -> None:
    """All paths go to the host and leave the device."""
    for number, keys in enumerate(PATHS):
        await on_all(*(engine.store(keys, fill_of(rank, number)) for rank, engine in enumerate(made)))
        await on_all(*(engine.settle() for engine in made))
    await on_all(*(engine.cache.evict(Tier.DEVICE, PATH_PAGES * len(PATHS)) for engine in made))
    await on_all(*(engine.advance() for engine in made))


async def keeper_of(made: list[Named], number: int) -> int:
    """Loads a path back on all ranks. The rank whose bytes all of them get."""
    found = await on_all(*(engine.read(PATHS[number]) for engine in made))
    await on_all(*(engine.settle() for engine in made))
    (content,) = {bytes(plane) for planes in found for plane in planes}
    assert content == content[:1] * PLANE_BYTES
    rank, path = divmod(content[0], 16)
    assert path == number
    return rank - 1


def host(snapshot: WorkerSnapshot) -> PoolSnapshot:
    return next(pool for pool in snapshot.pools if pool.tier is Tier.HOST)


async def on_host(made: list[Named], keys: list[PageKey]) -> int:
    """Pages of a path that are on the host, the same on every rank."""
    (pages,) = {found.host_pages for found in await on_all(*(engine.cache.match(keys) for engine in made))}
    return pages


def host_memories(group: ProcessGroup) -> dict[int, int]:
    """Bytes of the memories of the size of a host pool that the workers have mapped, by inode: each counts once."""
    found = {}
    for rank in range(group.group.world_size):
        for line in Path(f"/proc/{group.running[f'r{rank}'].pid}/maps").read_text().splitlines():
            area, _, _, _, inode, *name = line.split(maxsplit=5)
            first, end = (int(at, 16) for at in area.split("-"))
            if name and "memfd:kvcoord-kv" in name[0] and end - first == SHARE * PAGE_BYTES:
                found[int(inode)] = end - first
    return found


async def votes_heard(group: ProcessGroup) -> int:
    """Votes that the coordinator has received."""
    snapshot = await ask(group.coordinators[0], 20.0)
    assert isinstance(snapshot, CoordinatorSnapshot)
    return snapshot.received["StreamVote"]


@pytest.mark.parametrize("ranks", [2, 4])
async def test_scenario_m_each_page_is_copied_once_kept_by_one_rank_and_read_by_all(tmp_path: Path, ranks: int) -> None:
    async with replicated(tmp_path, ranks) as group, AsyncExitStack() as stack:
        made = await connected(group, stack)
        await store(made)
        snapshots = [await group.status(rank) for rank in range(ranks)]
        pages = PATH_PAGES * len(PATHS)
        assert [host(snapshot).here for snapshot in snapshots] == [pages // ranks] * ranks
        assert {host(snapshot).cached for snapshot in snapshots} == {pages}
        assert {host(snapshot).capacity for snapshot in snapshots} == {ranks * SHARE}
        assert list(host_memories(group).values()) == [SHARE * PAGE_BYTES] * ranks
        to_host = [copies for snapshot in snapshots for copies in snapshot.copies if copies.direction[0] == "d"]
        assert sum(copies.bytes for copies in to_host) == pages * PAGE_BYTES
        assert [copies.pages for copies in to_host] == [pages // ranks] * ranks
        keepers = [await keeper_of(made, number) for number in range(len(PATHS))]
        assert sorted(keepers) == sorted(list(range(ranks)) * (len(PATHS) // ranks))
        await nothing_leaks(group)


async def test_ranks_that_share_heads_in_pairs_and_stages_keep_pages_for_their_own_set_only(tmp_path: Path) -> None:
    """TP 4 x PP 2 with two KV heads: ranks 0 and 1 hold the same, 2 and 3, and so on in the second stage."""
    group = replicated(tmp_path, 8, tp=4, pp=2, kv_replicas=2)
    async with group, AsyncExitStack() as stack:
        made = await connected(group, stack)
        for number, keys in enumerate(PATHS):
            await on_all(*(engine.store(keys, fill_of(rank, number)) for rank, engine in enumerate(made)))
            await on_all(*(engine.settle() for engine in made))
        await on_all(*(engine.cache.evict(Tier.DEVICE, 32) for engine in made))
        for number in range(4):
            sets: list[set[bytes]] = await on_all(*(engine.read(PATHS[number]) for engine in made))
            keepers = [content[0] // 16 - 1 for content in (bytes(*planes) for planes in sets)]
            first = keepers[0]
            assert first in (0, 1)
            assert keepers == [2 * (rank // 2) + first for rank in range(8)]
            await on_all(*(engine.settle() for engine in made))
        await nothing_leaks(group)


async def test_with_a_worker_that_is_killed_only_the_pages_that_it_kept_are_lost(tmp_path: Path) -> None:
    async with replicated(tmp_path, 4) as group, AsyncExitStack() as stack:
        made = await connected(group, stack)
        await store(made)
        keepers = [await keeper_of(made, number) for number in range(len(PATHS))]
        heard = await votes_heard(group)
        agreeing = [asyncio.ensure_future(made[rank].cache.agree("own/1", True)) for rank in (0, 1, 3)]
        while await votes_heard(group) < heard + 3:
            pass
        await group.kill("r2")
        for outcome in await on_all(*agreeing):
            assert isinstance(outcome, Aborted)
            assert (outcome.reason, outcome.rank) == (Reason.RANK_LOST, 2)
        waiting = [asyncio.ensure_future(advance_for_ever(made[rank])) for rank in (0, 1, 3)]
        await group.worker(2)
        for call in waiting:
            with pytest.raises(GroupRenewed, match="rank 2"):
                await call
        for rank in (0, 1, 3):
            await made[rank].cache.register(model="model@1")
            made[rank].step = 0
        made[2] = await stack.enter_async_context(Named(group.address(2)))
        await on_all(*(engine.advance() for engine in made))
        there = [await on_host(made, keys) for keys in PATHS]
        assert there == [0 if keeper == 2 else PATH_PAGES for keeper in keepers]
        snapshots = [await group.status(rank) for rank in range(4)]
        assert [host(snapshot).here for snapshot in snapshots] == [8, 8, 0, 8]
        assert [await keeper_of(made, number) for number in range(8) if keepers[number] != 2] == [
            keeper for keeper in keepers if keeper != 2
        ]
        await nothing_leaks(group)
        lost = keepers.index(2)
        await on_all(*(engine.store(PATHS[lost], fill_of(rank, lost)) for rank, engine in enumerate(made)))
        await on_all(*(engine.settle() for engine in made))
        await on_all(*(engine.cache.evict(Tier.DEVICE, 64) for engine in made))
        assert await keeper_of(made, lost) == 2
        await nothing_leaks(group)


async def test_a_load_reads_on_in_the_memory_of_a_worker_that_was_killed_meanwhile(tmp_path: Path) -> None:
    """The map outlives its maker: nobody crashes, and the load ends with its group."""
    group = replicated(tmp_path, 2).equip(1, host_pages=SHARE, copy_faults={"delay_s": 0.3})
    async with group, AsyncExitStack() as stack:
        made = await connected(group, stack)
        await store(made)
        keepers = [await keeper_of(made, number) for number in range(2)]
        number = keepers.index(0)
        await on_all(*(engine.cache.evict(Tier.DEVICE, 64) for engine in made))
        loading = asyncio.ensure_future(made[1].cache.acquire(PATHS[number]))
        await group.until(1, lambda snapshot: bool(snapshot.leases_open))
        await group.kill("r0")
        lease = await loading
        views = [made[1].cache.device[0].view(layer, slot) for layer in range(LAYERS) for slot in lease.slots[0]]
        assert {bytes(view) for view in views} == {fill_of(0, number) * PLANE_BYTES}
        del views
        await group.until(1, suspended)
        await group.worker(0)
        await group.all_active()


async def test_pages_that_are_kept_once_outlive_the_engines(tmp_path: Path) -> None:
    async with replicated(tmp_path, 2) as group:
        async with AsyncExitStack() as stack:
            made = await connected(group, stack)
            await store(made)
            keepers = [await keeper_of(made, number) for number in range(len(PATHS))]
        async with AsyncExitStack() as stack:
            made = await connected(group, stack)
            assert [await on_host(made, keys) for keys in PATHS] == [PATH_PAGES] * len(PATHS)
            assert [await keeper_of(made, number) for number in range(len(PATHS))] == keepers
            await nothing_leaks(group)


async def test_a_rank_with_another_number_of_host_pages_is_refused_by_name(tmp_path: Path) -> None:
    group = replicated(tmp_path, 2)

    async def join() -> None:
        await group.worker(1, host_pages=SHARE + 1)
        await group.running["r1"].watch()

    async with group.children:
        await group.coordinator()
        await group.worker(0)
        with pytest.raises(PeerUnavailable, match="host_pages"):
            await join()
