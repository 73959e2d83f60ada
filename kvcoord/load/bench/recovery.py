"""`kvcoord bench recovery`: from kill -9 of the coordinator to the next agreed decision.

Ranks that are members themselves decide one thing after another. The coordinator is killed; what takes its place is
a standby that was already running, or the same one started again by a supervisor that noticed at once.
"""

import asyncio
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from os import kill
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from kvcoord.config.process import CoordinatorConfig, LogLevel, WorkerConfig
from kvcoord.domain import Agreement, OperationKind, Outcome
from kvcoord.load.bench.bed import write_config
from kvcoord.load.bench.result import Result
from kvcoord.load.bench.subjects import FREE, group_config
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.messages import Vote
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children
from kvcoord.runtime.member import Member

SECONDS_MAX: Final = 1.0
GIVE_UP_S: Final = 60.0
BEFORE_S: Final = 0.3
"""Decisions are taken for so long before the kill."""


class Successor(StrEnum):
    """What takes the place of a killed coordinator."""

    STANDBY = "standby"
    RESTART = "restart"


class RecoveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way to recover. Seconds from the kill to the first decision that all ranks have agreed on since."""

    case: str
    ranks: int
    runs: int
    p50_s: float
    max_s: float
    decisions_aborted: int
    budget: str
    met: bool


class Recovered(msgspec.Struct, frozen=True):
    """One run: how long it took, and how many decisions were aborted on the way."""

    seconds: float
    aborted: int


async def recovery(ranks: int, *, runs: int, on_case: Callable[[str], None] = lambda _: None) -> Result:
    """Kills a coordinator `runs` times for each successor."""
    rows = []
    for successor in Successor:
        recovered = []
        for number in range(runs):
            on_case(f"{successor}, run {number + 1}")
            recovered.append(await recover(ranks, successor))
        seconds = [run.seconds for run in recovered]
        rows.append(
            RecoveryRow(
                case=f"kill -9, {successor}",
                ranks=ranks,
                runs=runs,
                p50_s=median(seconds),
                max_s=max(seconds),
                decisions_aborted=sum(run.aborted for run in recovered),
                budget=f"< {SECONDS_MAX:g} s",
                met=max(seconds) < SECONDS_MAX,
            )
        )
    notes = ["With the timeouts that kvcoord has by default.", "A restart includes starting a Python process."]
    return Result(name="recovery", title="Losing the coordinator", rows=rows, notes=notes)


async def recover(ranks: int, successor: Successor) -> Recovered:
    """One run. Raises TimeoutError when the ranks never agree again."""
    with tempfile.TemporaryDirectory(prefix="kvcoord-") as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children:
            first = await _coordinator(children, folder, "first")
            addresses = [_address(folder, "first")]
            if successor is Successor.STANDBY:
                await _coordinator(children, folder, "standby")
                addresses.append(_address(folder, "standby"))
            deciders = _Deciders(ranks, addresses)
            try:
                await deciders.open()
                await asyncio.sleep(BEFORE_S)
                first.ending = True
                killed_s = time.monotonic()
                deciders.killed(killed_s)
                kill(first.pid, signal.SIGKILL)
                if successor is Successor.RESTART:
                    await _coordinator(children, folder, "first")
                async with asyncio.timeout(GIVE_UP_S):
                    return await deciders.recovered()
            finally:
                await deciders.close()


async def _coordinator(children: Children, folder: Path, name: str) -> Child:
    config = CoordinatorConfig(bind=[_address(folder, name)], http=None, log_level=LogLevel.ERROR)
    path = write_config(folder, name, config)
    child = await children.start(name, [*KVCOORD, "coordinator", "--config", path, *SERVE])
    await child.ready()
    return child


def _address(folder: Path, name: str) -> str:
    return f"unix://{folder}/{name}.sock"


class _Deciders:
    """One thread a rank, in lockstep: each decision is taken by all ranks before the next is put."""

    def __init__(self, ranks: int, addresses: list[str]) -> None:
        group = group_config("recovery", ranks, 1)
        self._members = [
            Member(WorkerConfig(group=group, rank=rank, coordinators=addresses, http=None), {}, events=Digest().log)
            for rank in range(ranks)
        ]
        self._pool = ThreadPoolExecutor(ranks)
        self._stop = threading.Event()
        self._killed_s: float | None = None
        self._running: list[asyncio.Future[Recovered]] = []

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._pool, member.open, FREE) for member in self._members))
        self._running = [loop.run_in_executor(self._pool, self._decide, member) for member in self._members]

    def killed(self, at_s: float) -> None:
        self._killed_s = at_s

    async def recovered(self) -> Recovered:
        """The slowest rank's word."""
        runs = await asyncio.gather(*self._running)
        return Recovered(max(run.seconds for run in runs), max(run.aborted for run in runs))

    async def close(self) -> None:
        self._stop.set()
        for member in self._members:
            await asyncio.to_thread(member.close)
        await asyncio.gather(*self._running, return_exceptions=True)
        self._pool.shutdown()

    def _decide(self, member: Member) -> Recovered:
        """Until a decision commits that was put after the kill."""
        number = aborted = 0
        while not self._stop.is_set():
            put_s = time.monotonic()
            vote = Vote(f"decision/{number}", OperationKind.CUSTOM, True, Agreement.MIN, value=number)
            decision = member.decide(vote)
            number += 1
            killed_s = self._killed_s
            if decision.outcome is not Outcome.COMMIT:
                aborted += 1
            elif killed_s is not None and put_s > killed_s:
                return Recovered(time.monotonic() - killed_s, aborted)
        return Recovered(GIVE_UP_S, aborted)
