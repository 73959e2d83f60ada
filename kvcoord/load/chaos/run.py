"""One run under chaos: faults for a while, then calm, then the promises checked from the outside.

Checked are: every page read is right, the ranks end equal, nothing leaks, no call takes longer than its limit, the
group comes together again after every fault, nothing ends by itself, memory is flat, and nothing is left behind.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

from kvcoord.client import connect
from kvcoord.errors import DeadlineExceeded, KvcoordError
from kvcoord.load.chaos.engine import ChaosReport
from kvcoord.load.chaos.faults import Fault, FaultKind, draw, inflict
from kvcoord.load.chaos.group import ChaosGroup
from kvcoord.load.chaos.memory import MemoryWatch
from kvcoord.load.chaos.report import ChaosSummary, fault_rows
from kvcoord.load.plan import worker_address
from kvcoord.load.report import leaks_of
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.runtime.children import Children

RECOVERY_LIMIT_S: Final = 40.0
"""From the end of a fault until every engine has gone on, when nothing else happens."""

PATIENT: Final = 0.7
"""How often the next fault comes only after the group has recovered from the last one."""

PAUSE_S: Final = (0.1, 1.5)
"""Between faults."""

FINISH_AHEAD: Final = 400
"""Requests from the word to finish until the end: no engine may have passed it when it hears of it."""

GROWTH_BYTES_MAX: Final = 16 << 20
"""What a process may grow by over a long life once it has settled."""

SHARED_MEMORY: Final = Path("/dev/shm")


async def run(seed: int, seconds: float, ranks: int, *, replicated: bool = False) -> ChaosSummary:
    """With `replicated` ranks hold the same bytes, and keep each host page once.

    Raises what starting a process raises; whatever goes wrong later is a violation in the summary.
    """
    shared_before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="kvcoord-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children:
            group = ChaosGroup(folder, children, ranks, replicated=replicated)
            try:
                chaos = _Chaos(seed, seconds, folder, group, children)
                await group.start()
                await chaos.play()
            finally:
                await group.close()
        group.violations += _left_behind(folder, shared_before)
    return chaos.summary()


class _Chaos:
    def __init__(self, seed: int, seconds: float, folder: Path, group: ChaosGroup, children: Children) -> None:
        self._seed, self._seconds, self._folder = seed, seconds, folder
        self._group = group
        self._children = children
        self._rng = Random(seed)
        self._memory = MemoryWatch()
        self._recoveries: list[tuple[FaultKind, float | None]] = []
        self._reports: list[ChaosReport] = []
        self._moved = asyncio.Event()
        group.on_progress = self._moved.set

    async def play(self) -> None:
        watching = asyncio.create_task(self._watch_memory())
        try:
            if not await self._all_go_on("the start"):
                return
            async with asyncio.TaskGroup() as faults:
                until = time.monotonic() + self._seconds
                while time.monotonic() < until:
                    await self._one_fault(faults, draw(self._rng, len(self._group.ranks)))
                    await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            if await self._all_go_on("the last fault"):
                await self._finish()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _one_fault(self, faults: asyncio.TaskGroup, fault: Fault) -> None:
        """Waits for the recovery, or lets the next fault come on top of it."""
        if self._rng.random() >= PATIENT:
            faults.create_task(inflict(fault, self._group))
            self._recoveries.append((fault.kind, None))
            return
        await inflict(fault, self._group)
        begun_s = time.monotonic()
        recovered = await self._all_go_on(f"{fault.kind} ({fault.target})")
        self._recoveries.append((fault.kind, time.monotonic() - begun_s if recovered else None))

    async def _all_go_on(self, after: str) -> bool:
        """Whether every engine comes further than any has been by now."""
        goal = max(self._group.played.values())
        try:
            async with asyncio.timeout(RECOVERY_LIMIT_S):
                while min(self._group.played.values()) <= goal:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            self._group.violations.append(f"engines do not go on within {RECOVERY_LIMIT_S:g} s after {after}")
            return False
        return True

    async def _finish(self) -> None:
        group = self._group
        try:
            self._reports = await group.finish(max(group.played.values()) + FINISH_AHEAD, RECOVERY_LIMIT_S)
        except DeadlineExceeded as error:
            group.violations.append(str(error))
            return
        workers = [await self._status(rank) for rank in group.ranks]
        group.violations += _wrong(self._reports, [worker for worker in workers if worker is not None])

    async def _status(self, rank: int) -> WorkerSnapshot | None:
        try:
            async with connect(worker_address(self._folder, rank)) as onlooker:
                return await onlooker.status()
        except KvcoordError as error:
            self._group.violations.append(f"worker {rank} does not answer at the end: {error}")
            return None

    async def _watch_memory(self) -> None:
        while True:
            running = {child.pid: child.name.split()[0] for child in self._children.all() if child.code is None}
            self._memory.look(time.monotonic(), running)
            await asyncio.sleep(1.0)

    def summary(self) -> ChaosSummary:
        memory = self._memory.growth()
        grown = [
            f"{kind} has grown by {growth.growth_bytes_max >> 20} MiB over its life"
            for kind, growth in memory.items()
            if growth.growth_bytes_max > GROWTH_BYTES_MAX
        ]
        return ChaosSummary(
            seed=self._seed,
            ranks=len(self._group.ranks),
            seconds=self._seconds,
            faults=fault_rows(self._recoveries),
            requests=max(self._group.played.values()),
            pages_verified=sum(report.pages_verified for report in self._reports),
            pages_corrupt=sum(report.pages_corrupt for report in self._reports),
            step_max_s=max((report.step_max_s for report in self._reports), default=0.0),
            lives_ended=self._group.lives_ended,
            memory=memory,
            violations=[*self._group.violations, *grown],
        )


def _wrong(reports: Sequence[ChaosReport], workers: Sequence[WorkerSnapshot]) -> list[str]:
    """What the engines' reports and the workers' counters must not say after everything has ended."""
    wrong = []
    for rank, report in enumerate(reports):
        if report.pages_corrupt:
            wrong.append(f"engine {rank} read {report.pages_corrupt} wrong pages")
        if report.late:
            wrong.append(f"engine {rank} heard too late that it should finish")
    for field in ("digest", "index_digest", "pages_cached"):
        values = [getattr(worker, field) for worker in workers]
        if any(value != values[0] for value in values):
            wrong.append(f"ranks differ in {field}: {values}")
    for worker in workers:
        wrong += [
            f"rank {worker.rank} leaks {leak.pages} pages of {leak.tier}.{leak.pool}" for leak in leaks_of(worker)
        ]
        for field in ("leases_open", "operations_open", "divergences"):
            if getattr(worker, field):
                wrong.append(f"rank {worker.rank} ends with {field}={getattr(worker, field)}")
    return wrong


def _left_behind(folder: Path, shared_before: set[str]) -> list[str]:
    """Processes, sockets and shared memory that are still there after everything was ended."""
    left = [f"process {pid} is still running" for pid in _processes_of(folder)]
    left += [f"socket {path.name} is left behind" for path in sorted(folder.glob("*.sock"))]
    left += [f"shared memory {name} is left behind" for name in sorted(_shared_memory() - shared_before)]
    return left


def _processes_of(folder: Path) -> list[int]:
    """Processes whose command names this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _shared_memory() -> set[str]:
    return (
        {path.name for path in SHARED_MEMORY.iterdir() if "kvcoord" in path.name} if SHARED_MEMORY.is_dir() else set()
    )
