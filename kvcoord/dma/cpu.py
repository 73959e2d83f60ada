"""Copies between memories of this process: each run of adjacent pages in each plane is moved as one piece.

Small transfers are copied at once on the loop's thread, larger ones by a thread of their direction; a thread waits
in a queue, never in a loop of polls. Both settle in a callback of the loop, and many ends share one callback.
It knows nothing of operations, slots' owners or votes.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Final

from kvcoord.dma.engine import CopyPlan, CopyStatistics, Direction, DirectionStatistics, PoolCopy
from kvcoord.dma.moving import Move, Slices, move_calls
from kvcoord.dma.transfer import Transfer
from kvcoord.dma.wakeup import Wakeup
from kvcoord.errors import TransferFailed, UsageError
from kvcoord.memory.pages import PageMemory

INLINE_BYTES_MAX: Final = 256 * 1024
"""Up to here a copy (some tens of microseconds) costs the loop less than waking a thread and being woken by it."""

TRANSFERS_OPEN_MAX: Final = 4096


class CpuCopyEngine:
    """The `CopyEngine` of machines without a GPU.

    A transfer above `inline_bytes_max` bytes, or behind one that is still in a thread, goes to one of the `threads`
    threads of its direction; they start with the first such transfer. `transfers_open_max` bounds what waits.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        inline_bytes_max: int = INLINE_BYTES_MAX,
        threads: int = 1,
        transfers_open_max: int = TRANSFERS_OPEN_MAX,
    ) -> None:
        if threads < 1:
            raise UsageError("threads", threads, "each direction needs a thread")
        self._loop = loop
        self._inline_bytes_max = inline_bytes_max
        self._thread_count = threads
        self._transfers_open_max = transfers_open_max
        self._lanes = {direction: _Lane() for direction in Direction}
        self._closed = False
        self._wakeup = Wakeup(loop, self._settle_copied)

    @property
    def bytes_in_flight(self) -> int:
        return sum(lane.bytes_open for lane in self._lanes.values())

    def statistics(self) -> CopyStatistics:
        return CopyStatistics(
            device_to_host=self._lanes[Direction.DEVICE_TO_HOST].statistics(),
            host_to_device=self._lanes[Direction.HOST_TO_DEVICE].statistics(),
        )

    def submit(self, plan: CopyPlan) -> Transfer:
        if self._closed:
            raise UsageError("submit", plan.name, "this engine is closed")
        if sum(len(lane.jobs) for lane in self._lanes.values()) >= self._transfers_open_max:
            raise UsageError("transfers_open_max", self._transfers_open_max, "await open transfers before more")
        lane = self._lanes[plan.direction]
        job = _Job(plan, self._loop)
        lane.open(job)
        if job.total_bytes <= self._inline_bytes_max and not lane.queued:
            _copy(job, _at_once, self._wakeup.wake)
        else:
            if not lane.threads:
                self._start_threads(lane, plan.direction)
            lane.enqueue(job)
        return job.transfer

    async def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            while lane.jobs:
                with suppress(TransferFailed):
                    await lane.jobs[-1].transfer
        for lane in self._lanes.values():
            lane.end_threads()

    def _start_threads(self, lane: "_Lane", direction: Direction) -> None:
        for number in range(self._thread_count):
            name = f"kvcoord-{direction}-{number}"
            lane.threads.append(threading.Thread(target=self._work, args=(lane,), name=name, daemon=True))
            lane.threads[-1].start()

    def _work(self, lane: "_Lane") -> None:
        while (job := lane.queue.get()) is not None:
            _copy(job, _beside_the_loop, self._wakeup.wake_from_thread)
            del job  # The next wait may be long; a copy that is over must not keep its memories.

    def _settle_copied(self) -> None:
        for lane in self._lanes.values():
            lane.settle_copied()


class _Job:
    """One plan on its way. A thread writes `layers_copied`, `copying_s`, `error` and, last, `copied`."""

    __slots__ = ("copied", "copying_s", "error", "layers_copied", "leases", "plan", "queued", "total_bytes", "transfer")

    def __init__(self, plan: CopyPlan, loop: asyncio.AbstractEventLoop) -> None:
        self.plan = plan
        self.leases = plan.lease()
        self.total_bytes = plan.total_bytes
        self.transfer = Transfer(plan.name, plan.layer_count, loop)
        self.queued = False
        self.layers_copied = 0
        self.copying_s = 0.0
        self.error: TransferFailed | None = None
        self.copied = False


class _Lane:
    """One direction: its jobs, in submission order until they settle, its threads and its totals."""

    def __init__(self) -> None:
        self.jobs: deque[_Job] = deque()
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        self.queued = 0
        self.threads: list[threading.Thread] = []
        self.bytes_open = 0
        self._transfers = self._failed = self._copied_bytes = self._runs = 0
        self._copying_s = 0.0

    def open(self, job: _Job) -> None:
        self.jobs.append(job)
        self.bytes_open += job.total_bytes

    def enqueue(self, job: _Job) -> None:
        """Hand an open job to the threads."""
        job.queued = True
        self.queued += 1
        self.queue.put(job)

    def settle_copied(self) -> None:
        """Settle from the oldest job on, as far as they are copied; then tell the oldest open one its progress."""
        jobs = self.jobs
        while jobs and jobs[0].copied:
            self._settle(jobs.popleft())
        if jobs and jobs[0].transfer.layers_awaited:
            jobs[0].transfer.land(jobs[0].layers_copied)

    def end_threads(self) -> None:
        """Let the idle threads end and wait for that."""
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def statistics(self) -> DirectionStatistics:
        return DirectionStatistics(
            transfers=self._transfers,
            failed=self._failed,
            copied_bytes=self._copied_bytes,
            runs=self._runs,
            copying_s=self._copying_s,
        )

    def _settle(self, job: _Job) -> None:
        for lease in job.leases:
            lease.release()
        self.queued -= job.queued
        self.bytes_open -= job.total_bytes
        self._transfers += 1
        self._copying_s += job.copying_s
        if job.error is None:
            self._copied_bytes += job.total_bytes
            self._runs += job.plan.run_count
        else:
            self._failed += 1
            job.transfer.land(job.layers_copied)
        job.transfer.settle(job.error)


def _copy(job: _Job, move_for: Callable[[PoolCopy], Move], wake: Callable[[], None]) -> None:
    """Move a job's bytes, layer by layer, on the calling thread; `wake` when there is something to tell the loop."""
    started_s = perf_counter()
    transfer = job.transfer
    try:
        pools = [(len(pool.layers), pool.layers, pool.pieces, move_for(pool)) for pool in job.plan.pools]
        for layer in range(transfer.layer_count):
            for layer_count, layers, pieces, move in pools:
                if layer < layer_count:
                    move(layers[layer], pieces)
            job.layers_copied = layer + 1
            if transfer.layers_awaited:
                wake()
    except Exception as cause:
        job.error = TransferFailed(transfer.name, job.layers_copied, f"{type(cause).__name__}: {cause}")
    job.copying_s = perf_counter() - started_s
    job.copied = True
    wake()


def _at_once(pool: PoolCopy) -> Move:
    """For the loop's thread: it does nothing else meanwhile, so it need not let other threads have the interpreter."""
    source, destination = pool.source, pool.destination
    if isinstance(source, PageMemory) and isinstance(destination, PageMemory):
        return Slices(source, destination)
    return move_calls


def _beside_the_loop(_: PoolCopy) -> Move:
    """For a thread: the loop goes on."""
    return move_calls
