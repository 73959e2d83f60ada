"""Scenarios from the field that are about sockets, shutdown and restarts, with real processes: O to R."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvcoord.domain import Aborted, Committed, Reason
from kvcoord.errors import GroupRenewed
from kvcoord.load.chaos.link import Link, LinkState
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.groups import group as fresh_group
from tests.runtime.process_group import ProcessGroup
from tests.runtime.test_failures_worker import engines, nothing_leaks, store_and_read_back, suspended

# --- liveness, restart, rejoin ----------------------------------------------------------------------------------------


async def test_scenario_o_an_idle_group_stays_together_for_several_times_the_liveness_timeout(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path, 2).limit(heartbeat_timeout_s=3.0)
    async with group, engines(group) as made:
        before = await group.status(0)
        await group.until(0, lambda snapshot: snapshot.uptime_s > before.uptime_s + 9.5)
        assert (await group.status(0)).epoch == before.epoch
        await store_and_read_back(made)


async def test_scenario_r_a_worker_that_leaves_in_good_order_is_missed_at_once_and_told_by_name(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2) as group, engines(group):
        group.running["r1"].ending = True
        group.running["r1"].signal(signal.SIGTERM)
        seen = await group.until(0, suspended)
        assert "1" in seen.ready_reason
        assert await group.running["r1"].wait() == 0


async def test_scenario_o_a_worker_started_again_faster_than_a_heartbeat_is_the_new_one(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2) as group, engines(group) as (a, _):
        before = await group.status(1)
        for _ in range(2):
            await group.kill("r1")
            await group.worker(1)
        with pytest.raises(GroupRenewed):
            await a.hold_and_release_for_ever()
        after = await group.until(1, lambda snapshot: snapshot.state == "active")
        assert after.incarnation != before.incarnation


# --- the coordinator is lost ------------------------------------------------------------------------------------------


async def test_scenario_p_a_vote_that_only_one_rank_had_put_when_the_coordinator_was_killed_aborts_on_all(
    tmp_path: Path,
) -> None:
    async with ProcessGroup(tmp_path, 2) as group, engines(group) as (a, b):
        early = asyncio.ensure_future(a.cache.agree("own/1", True))
        await group.voting()
        await group.kill("c0")
        await on_all(group.until(0, suspended), group.until(1, suspended))
        await group.coordinator()
        outcome = await early
        assert isinstance(outcome, Aborted)
        assert outcome.reason is Reason.IN_DOUBT
        assert await b.cache.agree("own/1", True) == outcome
        assert all(
            isinstance(each, Committed) for each in await on_all(*(e.cache.agree("own/2", True) for e in (a, b)))
        )
        await store_and_read_back([a, b])
        await nothing_leaks(group)


async def test_scenario_p_a_stopped_coordinator_that_goes_on_is_used_again_and_nothing_is_lost(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path, 2).limit_ranks(heartbeat_timeout_s=2.0)
    async with group, engines(group) as made:
        await on_all(*(engine.store(KEYS, b"x") for engine in made))
        group.stop("c0")
        waiting = [asyncio.ensure_future(engine.settle()) for engine in made]
        await on_all(group.until(0, suspended), group.until(1, suspended))
        group.carry_on("c0")
        await on_all(*waiting)
        assert await on_all(*(engine.read(KEYS) for engine in made)) == [{b"x" * 64}] * 2
        await on_all(*(engine.settle() for engine in made))
        await nothing_leaks(group)


class LinkedGroup(ProcessGroup):
    """Two coordinators, and a line that can be cut between every rank and each of them."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        super().__init__(folder, 2, coordinators=2)
        self.limit(gather_timeout_s=0.8)
        self.lines: dict[tuple[int, int], Link] = {}
        self._stack = stack

    async def start(self) -> None:
        for index in range(2):
            await self.coordinator(index)
        for rank in range(2):
            for index in range(2):
                line = self.lines[rank, index] = Link(
                    self.folder / f"l{rank}{index}.sock", self.folder / f"c{index}.sock"
                )
                await line.open()
                self._stack.push_async_callback(line.close)

    async def linked_worker(self, rank: int) -> None:
        await self.worker(rank, coordinators=[f"ipc://{self.folder}/l{rank}{index}.sock" for index in range(2)])


async def test_scenario_p_ranks_that_are_at_different_coordinators_come_together(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, LinkedGroup(tmp_path, stack) as group:
        group.lines[1, 0].set(LinkState.CUT)
        for rank in range(2):
            await group.linked_worker(rank)
        async with engines(group) as made:
            assert {(await group.status(rank)).coordinator[-7:] for rank in range(2)} == {"01.sock", "11.sock"}
            await store_and_read_back(made)


async def test_scenario_o_a_rank_that_is_cut_off_for_a_moment_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, LinkedGroup(tmp_path, stack) as group:
        for rank in range(2):
            await group.linked_worker(rank)
        async with engines(group) as made:
            await on_all(*(engine.store(KEYS, b"x") for engine in made))
            await on_all(*(engine.settle() for engine in made))
            for index in range(2):
                group.lines[1, index].set(LinkState.CUT)
            await on_all(group.until(0, suspended), group.until(1, suspended))
            for index in range(2):
                group.lines[1, index].set(LinkState.OPEN)
            await on_all(*(engine.settle() for engine in made))
            assert await on_all(*(engine.read(KEYS) for engine in made)) == [{b"x" * 64}] * 2
            await on_all(*(engine.settle() for engine in made))
            await nothing_leaks(group)


async def test_scenario_q_a_line_that_carries_only_one_way_suspends_both_ends_and_heals(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, LinkedGroup(tmp_path, stack) as group:
        group.limit_ranks(heartbeat_timeout_s=2.0)
        for rank in range(2):
            await group.linked_worker(rank)
        async with engines(group) as made:
            for index in range(2):
                group.lines[1, index].set(LinkState.DOWN_FROZEN)
            await on_all(group.until(0, suspended), group.until(1, suspended))
            for index in range(2):
                group.lines[1, index].set(LinkState.OPEN)
            await store_and_read_back(made)
            await nothing_leaks(group)


def sockets_of_ranks(folder: Path) -> list[Path]:
    return list(folder.glob("r*.sock"))


# --- shutdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_scenario_r_a_worker_ends_in_good_order_also_when_its_coordinator_does_not_answer(
    how: str, tmp_path: Path
) -> None:
    async with ProcessGroup(tmp_path, 1) as group, engines(group):
        if how == "killed":
            await group.kill("c0")
        else:
            group.stop("c0")
        group.running["r0"].ending = True
        group.running["r0"].signal(signal.SIGTERM)
        assert await group.running["r0"].wait() == 0
    assert not sockets_of_ranks(tmp_path)


# --- the first messages -----------------------------------------------------------------------------------------------


async def test_scenario_q_in_fresh_starts_the_first_operation_is_decided_on_all_ranks(tmp_path: Path) -> None:
    """It is asked for while the group comes together: whatever the sockets lose then is said again."""
    for start in range(25):
        folder = tmp_path / str(start)
        folder.mkdir()
        async with fresh_group(folder, world_size=2, lockstep=False) as group, AsyncExitStack() as stack:
            made = [await stack.enter_async_context(Engine(group.address(rank))) for rank in range(2)]
            outcomes = await on_all(*(engine.cache.agree("first", True) for engine in made))
            assert [bool(outcome) for outcome in outcomes] == [True, True]
