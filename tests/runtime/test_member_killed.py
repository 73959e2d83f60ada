"""The coordinator of two members is killed or stopped while their engines decide: on a node link, and over ZeroMQ."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvcoord.config import CoordinatorConfig, LogLevel, Timeouts, WorkerConfig
from kvcoord.config.group import GroupConfig
from kvcoord.domain import Agreement, OperationKind, Outcome
from kvcoord.protocol.messages import Value, Vote
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children
from kvcoord.runtime.member import Member
from tests.runtime.process_group import PATIENT

Told = list[tuple[str, Outcome, Value]]

RANKS = 2
DECISIONS = 300
DISTURBED_AT = 100


async def coordinator(children: Children, folder: Path, address: str) -> Child:
    config = CoordinatorConfig(
        bind=[address], http=None, recorder_dir=str(folder), log_level=LogLevel.ERROR, timeouts=PATIENT
    )
    path = folder / "coordinator.yaml"
    path.write_bytes(msgspec.json.encode(config))
    child = await children.start(address, [*KVCOORD, "coordinator", "--config", str(path), *SERVE])
    await child.ready()
    return child


def engine(one: Member, rank: int, disturb: Callable[[], None]) -> Told:
    """What one rank has been told, in order. Rank 0 disturbs, while the other waits for its vote."""
    told = []
    for number in range(DECISIONS):
        if number == DISTURBED_AT and rank == 0:
            disturb()
        decision = one.decide(Vote(f"op/{number}", OperationKind.CUSTOM, True, Agreement.MIN, value=number))
        told.append((decision.operation, decision.outcome, decision.value))
    return told


async def decided(
    addresses: list[str], timeouts: Timeouts, disturb: Callable[[], Coroutine[None, None, None]]
) -> list[Told]:
    """What two engines on threads of their own are told; `disturb` runs between two decisions of one of them."""
    loop = asyncio.get_running_loop()
    members = [
        Member(
            WorkerConfig(
                group=GroupConfig(world_size=RANKS), rank=rank, coordinators=addresses, timeouts=timeouts, http=None
            ),
            {},
            events=lambda: [("", 0)],
        )
        for rank in range(RANKS)
    ]

    def on_engine() -> None:
        asyncio.run_coroutine_threadsafe(disturb(), loop).result()

    with ThreadPoolExecutor(RANKS) as threads:
        await asyncio.gather(*(loop.run_in_executor(threads, one.open, [10]) for one in members))
        told = await asyncio.gather(
            *(loop.run_in_executor(threads, engine, one, rank, on_engine) for rank, one in enumerate(members))
        )
        await asyncio.gather(*(loop.run_in_executor(threads, one.close) for one in members))
    return told


def check(told: list[Told]) -> None:
    """All have heard the same, and at most what was in doubt when the coordinator went was not agreed."""
    assert told[0] == told[1]
    committed = [entry for entry in told[0] if entry[1] is Outcome.COMMIT]
    assert len(committed) >= DECISIONS - 1
    assert committed[-1] == (f"op/{DECISIONS - 1}", Outcome.COMMIT, DECISIONS - 1)


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
@pytest.mark.parametrize("successor", ["standby", "restarted"])
async def test_engines_go_on_deciding_and_both_hear_the_same(scheme: str, successor: str, tmp_path: Path) -> None:
    first, standby = (f"{scheme}://{tmp_path}/{name}.sock" for name in ("a", "b"))
    async with Children(keep_errors=True) as children:
        killed = await coordinator(children, tmp_path, first)

        async def kill() -> None:
            await killed.kill()
            if successor == "restarted":
                await coordinator(children, tmp_path, first)

        if successor == "standby":
            await coordinator(children, tmp_path, standby)
        check(await decided([first, standby] if successor == "standby" else [first], PATIENT, kill))


async def test_engines_that_wait_on_a_coordinator_that_was_stopped_are_woken_and_go_on_at_the_next(
    tmp_path: Path,
) -> None:
    first, standby = (f"unix://{tmp_path}/{name}.sock" for name in ("a", "b"))
    timeouts = msgspec.structs.replace(PATIENT, heartbeat_timeout_s=3.0, gather_timeout_s=2.0)
    async with Children(keep_errors=True) as children:
        stopped = await coordinator(children, tmp_path, first)
        await coordinator(children, tmp_path, standby)

        async def stop() -> None:
            stopped.signal(signal.SIGSTOP)

        told = await decided([first, standby], timeouts, stop)
        stopped.signal(signal.SIGCONT)
    assert told[0] == told[1]
    assert told[0][-1][:2] == (f"op/{DECISIONS - 1}", Outcome.COMMIT)
