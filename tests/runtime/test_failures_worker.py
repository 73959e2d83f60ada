"""Workers are killed and stopped: the others are answered, nothing hangs, and the group comes together again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvcoord.domain import Aborted, Committed, PageKey, Reason, Tier
from kvcoord.errors import GroupLost, GroupRenewed, PeerUnavailable
from kvcoord.observability.snapshot import WorkerSnapshot
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.process_group import ProcessGroup


@asynccontextmanager
async def engines(group: ProcessGroup) -> AsyncIterator[list[Engine]]:
    """One engine for each rank, in lockstep after its first step."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(Engine(group.address(rank))) for rank in range(group.group.world_size)]
        if group.group.lockstep:
            await on_all(*(engine.advance() for engine in made))
        else:
            await group.all_active()
        yield made


async def advance_for_ever(engine: Engine) -> None:
    """Until a step raises."""
    while True:
        await engine.advance()


async def begin_again(engine: Engine) -> None:
    """What an engine does when its group began anew."""
    await engine.cache.register()
    engine.step = 0


async def store_and_read_back(made: list[Engine], keys: list[PageKey] = KEYS) -> None:
    """A path goes to the host, leaves the device, comes back, and is right on every rank."""
    fills = [bytes([65 + rank]) for rank in range(len(made))]
    await on_all(*(engine.store(keys, fill) for engine, fill in zip(made, fills, strict=True)))
    await on_all(*(engine.settle() for engine in made))
    await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in made))
    assert await on_all(*(engine.read(keys) for engine in made)) == [{fill * 64} for fill in fills]
    await on_all(*(engine.settle() for engine in made))


async def nothing_leaks(group: ProcessGroup) -> None:
    """On every rank a page is free or cached, and nobody holds anything."""
    for rank in range(group.group.world_size):
        snapshot = await group.status(rank)
        assert (snapshot.leases_open, snapshot.operations_open) == (0, 0)
        for pool in snapshot.pools:
            assert pool.free + pool.cached == pool.capacity
            assert (pool.reserved, pool.quarantined) == (0, 0)


def suspended(snapshot: WorkerSnapshot) -> bool:
    return snapshot.state != "active"


async def test_without_lockstep_votes_abort_at_once_when_a_worker_was_killed_and_name_it(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 3, lockstep=False) as group, engines(group) as (a, b, c):
        await group.kill("r2")
        await on_all(group.until(0, suspended), group.until(1, suspended))
        for name in ("own/1", "own/2"):
            for outcome in await on_all(a.cache.agree(name, True), b.cache.agree(name, True)):
                assert isinstance(outcome, Aborted)
                assert (outcome.reason, outcome.rank) == (Reason.RANK_LOST, 2)
        with pytest.raises(PeerUnavailable):
            await c.cache.agree("own/1", True)


async def test_a_vote_that_was_open_when_a_worker_was_killed_aborts_and_names_it(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 3) as group, engines(group) as (a, b, _):
        waiting = [asyncio.ensure_future(engine.cache.agree("own/1", True)) for engine in (a, b)]
        await group.voting()
        await group.kill("r2")
        for outcome in await on_all(*waiting):
            assert isinstance(outcome, Aborted)
            assert (outcome.reason, outcome.rank) == (Reason.RANK_LOST, 2)


async def test_a_killed_worker_comes_back_and_the_group_begins_anew_with_bytes_that_are_right(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 3) as group, engines(group) as (a, b, _):
        waiting = [asyncio.ensure_future(advance_for_ever(engine)) for engine in (a, b)]
        await group.kill("r2")
        await group.worker(2)
        for call in waiting:
            with pytest.raises(GroupRenewed, match="rank 2"):
                await call
        await on_all(begin_again(a), begin_again(b))
        async with Engine(group.address(2)) as again:
            made = [a, b, again]
            await on_all(*(engine.advance() for engine in made))
            await store_and_read_back(made)
            await nothing_leaks(group)


async def test_a_worker_that_stays_away_ends_every_wait_with_the_cause(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2).limit(group_deadline_s=0.5) as group, engines(group) as (a, _):
        waiting = asyncio.ensure_future(advance_for_ever(a))
        await group.kill("r1")
        with pytest.raises(GroupLost, match="rank"):
            await waiting
        with pytest.raises(GroupLost):
            await a.advance()


async def test_in_lockstep_a_vote_put_while_a_worker_is_away_is_decided_when_it_is_back(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path, 2).limit(heartbeat_timeout_s=4.0)
    async with group, engines(group) as (a, b):
        group.stop("r1")
        await group.until(0, suspended)
        early = asyncio.ensure_future(a.cache.agree("own/1", True))
        group.carry_on("r1")
        assert await on_all(early, b.cache.agree("own/1", True))


async def test_a_worker_stopped_before_its_vote_is_named_when_the_vote_times_out(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2).limit(vote_timeout_s=2.0) as group, engines(group) as (a, b):
        group.stop("r1")
        outcome = await a.cache.agree("own/1", True)
        assert isinstance(outcome, Aborted)
        assert (outcome.reason, outcome.rank) == (Reason.VOTE_TIMEOUT, 1)
        group.carry_on("r1")
        late = await b.cache.agree("own/1", True)
        assert late == outcome
        await store_and_read_back([a, b])
        await nothing_leaks(group)


async def test_a_worker_stopped_after_its_vote_hears_the_same_outcome_when_it_goes_on(tmp_path: Path) -> None:
    async with (
        ProcessGroup(tmp_path, 3).limit(heartbeat_timeout_s=4.0) as group,
        engines(group) as (a, b, c),
    ):
        stopped = asyncio.ensure_future(b.cache.agree("own/1", True))
        await group.voting()
        group.stop("r1")
        aborted = await a.cache.agree("own/1", True)
        assert isinstance(aborted, Aborted)
        assert (aborted.reason, aborted.rank) == (Reason.RANK_LOST, 1)
        group.carry_on("r1")
        assert await stopped == aborted
        assert await c.cache.agree("own/1", True) == aborted
        await group.all_active()
        assert await on_all(*(engine.cache.agree("own/2", True) for engine in (a, b, c)))
        await store_and_read_back([a, b, c])
        await nothing_leaks(group)


@pytest.mark.parametrize("copying", [True, False], ids=["copying", "complete"])
async def test_a_worker_stopped_while_copying_or_after_it_keeps_what_was_written(copying: bool, tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path, 2).limit(heartbeat_timeout_s=4.0)
    async with group, engines(group) as made:
        a, b = made
        await on_all(a.store(KEYS, b"A"), b.store(KEYS, b"B"))
        if not copying:
            await on_all(a.settle(), b.settle())
        group.stop("r1")
        waiting = asyncio.ensure_future(a.advance())
        await group.until(0, suspended)
        group.carry_on("r1")
        await on_all(waiting, b.advance())
        await on_all(a.settle(), b.settle())
        await on_all(*(engine.cache.evict(Tier.DEVICE, 4) for engine in made))
        assert [match.host_pages for match in await on_all(a.cache.match(KEYS), b.cache.match(KEYS))] == [4, 4]
        assert await on_all(a.read(KEYS), b.read(KEYS)) == [{b"A" * 64}, {b"B" * 64}]
        await on_all(a.settle(), b.settle())
        await nothing_leaks(group)


async def test_without_lockstep_a_copy_that_does_not_end_in_time_is_retracted_on_all_and_leaks_nothing(
    tmp_path: Path,
) -> None:
    group = ProcessGroup(tmp_path, 2, lockstep=False).limit(copy_timeout_s=2.0).equip(1, copy_faults={"delay_s": 5.0})
    async with group, AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(Engine(group.address(rank))) for rank in range(2)]
        slots = [[0, 1, 2, 3]]
        calls = [engine.cache.write_through(KEYS, slots, operation="w1", deferred=True) for engine in (a, b)]
        written = await on_all(*calls)
        assert [isinstance(pending.outcome, Committed) for pending in written] == [True, True]
        group.stop("r1")
        seen = await group.until(0, lambda snapshot: bool(snapshot.retractions))
        assert seen.retractions == {Reason.COPY_TIMEOUT.value: 1}
        group.carry_on("r1")
        for rank in range(2):
            await group.until(rank, lambda snapshot: snapshot.operations_open == 0 and bool(snapshot.retractions))
        await nothing_leaks(group)
        again = await on_all(*(engine.cache.match(KEYS) for engine in (a, b)))
        assert [match.host_pages for match in again] == [0, 0]
