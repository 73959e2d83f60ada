"""A replay: a coordinator, and a worker and an engine for each rank, as separate processes that play one trace.

Starts them with their sockets in a folder of their own, lets the engines begin together, collects what they report,
reads the workers' counters, and leaves nothing behind: no process, no socket, no folder. The first process that fails
ends the replay.
"""

import asyncio
import signal
import socket
import tempfile
import time
from asyncio import TaskGroup
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.client import connect
from kvcoord.client.failures import exception_of
from kvcoord.errors import DeadlineExceeded
from kvcoord.load.dialogue import (
    EXPLAINED,
    DriverFailed,
    DriverReport,
    FromDriver,
    Progress,
    Ready,
    Settled,
    Settling,
    Start,
    line,
)
from kvcoord.load.plan import Agreeing, ReplayPlan, worker_address
from kvcoord.load.report import ReplayReport, differences, summarize
from kvcoord.load.supervisor import Kept
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children
from kvcoord.runtime.exits import cause_of

GLOO: Final = ("-m", "kvcoord.load.gloo")

START_TIMEOUT_S: Final = 120.0
"""All processes serve, and all engines are connected, within this time. Loading torch on a busy machine takes most."""

BLAME_TIMEOUT_S: Final = 1.0
"""A failure shows in several processes: one that died, found within this time, tells more than those that miss it."""

DIVERGENCE_TIMEOUT_S: Final = 10.0
DIVERGENCE_POLL_S: Final = 0.05
"""Workers of ranks that differ at the very end are asked again until they know where they first did."""

OnProgress = Callable[[int], None]
"""Called with the number of requests done."""


async def replay(plan: ReplayPlan, on_progress: OnProgress = lambda _: None) -> ReplayReport:
    """Plays it. Raises the error of the process that failed first."""
    with tempfile.TemporaryDirectory(prefix="kvcoord-", ignore_cleanup_errors=True) as folder:
        async with Children(keep_errors=True) as children:
            run = _Run(plan, Path(folder), children, on_progress)
            try:
                return await run.play()
            except ExceptionGroup as group:
                raise await run.blame(group) from group


class _Run:
    """One replay under way."""

    def __init__(self, plan: ReplayPlan, folder: Path, children: Children, on_progress: OnProgress) -> None:
        self._plan = plan
        self._folder = folder
        self._children = children
        self._on_progress = on_progress
        self._ranks = range(plan.group.world_size)
        self._workers: list[Child] = []
        self._coordinators: list[Kept] = []
        self._drivers: list[Child] = []
        self._killed = False
        self._decoder: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)
        self._settling: dict[int, int] = {}

    async def play(self) -> ReplayReport:
        """Raises an ExceptionGroup as soon as any process has failed."""
        async with TaskGroup() as tasks:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._start_services()
                    watches = [tasks.create_task(worker.watch()) for worker in self._workers]
                    watches.append(tasks.create_task(self._watch_coordinators()))
                    await self._start_drivers()
            except TimeoutError as error:
                raise DeadlineExceeded("start of all processes", "START_TIMEOUT_S", START_TIMEOUT_S) from error
            start = Start(time.monotonic())
            for driver in self._drivers:
                driver.say(line(start))
            listening = [tasks.create_task(self._report(rank)) for rank in self._ranks]
            reports = [await listened for listened in listening]
            workers = await self._statuses(reports)
            for driver in self._drivers:
                await driver.finish()
            for watch in watches:
                watch.cancel()
        return summarize(self._plan, reports, workers, sum(kept.lost for kept in self._coordinators))

    async def blame(self, group: ExceptionGroup) -> BaseException:
        """The error to show: how a process died if one did, since the others then only miss it."""
        coordinators = [kept.child for kept in self._coordinators]
        watches = [asyncio.create_task(child.watch()) for child in (*coordinators, *self._workers, *self._drivers)]
        done, waiting = await asyncio.wait(watches, timeout=BLAME_TIMEOUT_S, return_when=asyncio.FIRST_EXCEPTION)
        for watch in waiting:
            watch.cancel()
        died = [error for watch in watches if watch in done and (error := watch.exception()) is not None]
        return (died or [cause_of(group) or group])[0]

    async def _start_services(self) -> None:
        """Coordinator and workers, until all serve."""
        for index in range(self._plan.coordinator_count):
            start = partial(self._start_coordinator, index)
            again = start if self._plan.options.restart else None
            self._coordinators.append(Kept(await start(), again, self._children))
        for rank in self._ranks:
            path = self._write(f"rank{rank}", self._plan.worker(rank, self._folder))
            arguments = [*KVCOORD, "worker", "--config", path, *SERVE]
            if self._plan.options.agreement is Agreeing.GLOO:
                arguments = [*GLOO, path, str(self._folder / "gloo")]
            self._workers.append(await self._children.start(f"worker of rank {rank}", arguments))
        async with TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.ready())

    async def _start_coordinator(self, index: int) -> Child:
        name = "coordinator" if index == 0 else "standby coordinator"
        path = self._write(f"coordinator{index}", self._plan.coordinator(index, self._folder))
        child = await self._children.start(name, [*KVCOORD, "coordinator", "--config", path, *SERVE])
        await child.ready()
        return child

    async def _watch_coordinators(self) -> None:
        """Raises when the last of them has died and nobody starts it again."""
        await asyncio.gather(*(kept.run() for kept in self._coordinators))
        for kept in self._coordinators:
            await kept.child.watch()

    async def _start_drivers(self) -> None:
        """Engines, until all are connected to their workers."""
        upstream, downstream = dict.fromkeys(self._ranks, -1), dict.fromkeys(self._ranks, -1)
        joined: list[socket.socket] = []
        for sender, receiver in self._plan.stage_links():
            pair = socket.socketpair()
            joined += pair
            downstream[sender], upstream[receiver] = pair[0].fileno(), pair[1].fileno()
        for rank in self._ranks:
            descriptors = [fd for fd in (upstream[rank], downstream[rank]) if fd >= 0]
            arguments = ["-m", "kvcoord.load.driver"]
            driver = await self._children.start(
                f"engine of rank {rank}", arguments, talks=True, descriptors=descriptors, generation=1
            )
            driver.expected = EXPLAINED
            driver.say(line(self._plan.driver(rank, self._folder, upstream[rank], downstream[rank])))
            self._drivers.append(driver)
        for end in joined:
            end.close()
        for rank in self._ranks:
            said = await self._hear(rank)
            assert isinstance(said, Ready)

    async def _report(self, rank: int) -> DriverReport:
        """Listens to one engine until it has reported."""
        while True:
            said = await self._hear(rank)
            if isinstance(said, DriverReport):
                return said
            if isinstance(said, Progress):
                self._on_progress(said.requests)
                self._kill_coordinator(said.requests)
            elif isinstance(said, Settling):
                self._settle(rank, said.operations_open)

    def _kill_coordinator(self, requests: int) -> None:
        """Once, when it is time."""
        kill_at = self._plan.options.kill_coordinator
        if kill_at and requests >= kill_at and not self._killed:
            self._killed = True
            self._coordinators[0].child.signal(signal.SIGKILL)

    async def _hear(self, rank: int) -> FromDriver:
        said = self._decoder.decode(await self._drivers[rank].hear())
        if isinstance(said, DriverFailed):
            raise exception_of(said.failure)
        return said

    def _settle(self, rank: int, operations_open: int) -> None:
        """Ranks that decide alone settle together: each hears whether all have."""
        self._settling[rank] = operations_open
        if len(self._settling) == len(self._ranks):
            answer = Settled(not any(self._settling.values()))
            self._settling.clear()
            for driver in self._drivers:
                driver.say(line(answer))

    async def _statuses(self, reports: list[DriverReport]) -> list[WorkerSnapshot]:
        """The workers' counters. Of ranks that differ they are read until they say where they first did."""
        deadline = time.monotonic() + DIVERGENCE_TIMEOUT_S
        while True:
            workers = [await self._status(rank) for rank in self._ranks]
            told = all(worker.first_divergence for worker in workers) or not any(differences(reports, workers))
            if told or self._plan.options.agreement is Agreeing.GLOO or time.monotonic() > deadline:
                return workers
            await asyncio.sleep(DIVERGENCE_POLL_S)

    async def _status(self, rank: int) -> WorkerSnapshot:
        async with connect(worker_address(self._folder, rank)) as onlooker:
            return await onlooker.status()

    def _write(self, name: str, config: msgspec.Struct) -> str:
        """A configuration as a file. JSON is YAML."""
        path = self._folder / f"{name}.yaml"
        path.write_bytes(msgspec.json.encode(config))
        return str(path)
