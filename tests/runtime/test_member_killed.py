"""The coordinator of two members is killed with -9 while their engines decide: on a node link, and over ZeroMQ."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcoord.config import CoordinatorConfig, LogLevel, Timeouts, WorkerConfig
from kvcoord.config.group import GroupConfig
from kvcoord.domain import Agreement, OperationKind, Outcome
from kvcoord.protocol.messages import Vote
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children
from kvcoord.runtime.member import Member

RANKS = 2
DECISIONS = 300
KILLED_AT = 100

PATIENT = Timeouts(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=300.0, join_timeout_s=300.0, vote_timeout_s=300.0, linger_s=0.1
)
"""Longer than the test: the loss shows in the connection, and nothing else runs out."""


async def coordinator(children: Children, folder: Path, address: str) -> Child:
    config = CoordinatorConfig(bind=[address], http=None, recorder_dir=str(folder), log_level=LogLevel.ERROR)
    path = folder / "coordinator.yaml"
    path.write_bytes(msgspec.json.encode(config))
    child = await children.start(address, [*KVCOORD, "coordinator", "--config", str(path), *SERVE])
    await child.ready()
    return child


def engine(one: Member, rank: int, kill: Callable[[], None]) -> list[tuple[str, Outcome, Any]]:
    """What one rank has been told, in order. Rank 0 kills, while the other waits for its vote."""
    told = []
    for number in range(DECISIONS):
        if number == KILLED_AT and rank == 0:
            kill()
        decision = one.decide(Vote(f"op/{number}", OperationKind.CUSTOM, True, Agreement.MIN, value=number))
        told.append((decision.operation, decision.outcome, decision.value))
    return told


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
@pytest.mark.parametrize("successor", ["standby", "restarted"])
async def test_engines_go_on_deciding_and_both_hear_the_same(scheme: str, successor: str, tmp_path: Path) -> None:
    first, standby = (f"{scheme}://{tmp_path}/{name}.sock" for name in ("a", "b"))
    addresses = [first, standby] if successor == "standby" else [first]
    members = [
        Member(
            WorkerConfig(
                group=GroupConfig(world_size=RANKS), rank=rank, coordinators=addresses, timeouts=PATIENT, http=None
            ),
            {},
            events=lambda: [("", 0)],
        )
        for rank in range(RANKS)
    ]
    loop = asyncio.get_running_loop()
    async with Children(keep_errors=True) as children:
        killed = await coordinator(children, tmp_path, first)

        async def kill() -> None:
            await killed.kill()
            if successor == "restarted":
                await coordinator(children, tmp_path, first)

        if successor == "standby":
            await coordinator(children, tmp_path, standby)
        with ThreadPoolExecutor(RANKS) as threads:
            await asyncio.gather(*(loop.run_in_executor(threads, one.open, [10]) for one in members))
            told = await asyncio.gather(
                *(
                    loop.run_in_executor(
                        threads, engine, one, rank, lambda: asyncio.run_coroutine_threadsafe(kill(), loop).result()
                    )
                    for rank, one in enumerate(members)
                )
            )
            await asyncio.gather(*(loop.run_in_executor(threads, one.close) for one in members))
    assert told[0] == told[1]
    committed = [entry for entry in told[0] if entry[1] is Outcome.COMMIT]
    assert len(committed) >= DECISIONS - 1
    assert committed[-1] == (f"op/{DECISIONS - 1}", Outcome.COMMIT, DECISIONS - 1)
