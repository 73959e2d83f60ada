"""Checksums of host pages: taken when a page has been written through, compared before it is loaded back.

A page whose bytes have changed in between is not loaded: its transfer fails at its first layer, and a failed copy is a
miss on all ranks. What it cannot see is a page that was wrong when it arrived. It wraps any engine and keeps the
engine's promises; bytes are read by a thread of each direction, beside the copies that are under way.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import xxhash

from kvcoord.dma.engine import CopyEngine, CopyPlan, CopyStatistics, Direction
from kvcoord.dma.transfer import Transfer
from kvcoord.errors import TransferFailed, UsageError
from kvcoord.memory.pages import PageMemory, Pages

Sums = dict[int, int]
"""Checksum by slot, of the slots written so far."""


class CheckedCopyEngine:
    """A `CopyEngine` in front of another. The host side of every plan is memory of this process.

    `mismatches` counts pages that were found changed. A slot that was never written through this engine passes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: CopyEngine) -> None:
        self.mismatches = 0
        self._loop = loop
        self._engine = engine
        self._sums: dict[PageMemory, Sums] = {}
        self._lanes: dict[Direction, deque[_Job]] = {direction: deque() for direction in Direction}
        self._readers = {direction: ThreadPoolExecutor(1, f"kvcoord-check-{direction}") for direction in Direction}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(self, plan: CopyPlan) -> Transfer:
        if self._closed:
            raise UsageError("submit", plan.name, "this engine is closed")
        job = _Job(plan, self._loop)
        if plan.direction is Direction.DEVICE_TO_HOST:
            try:
                task = self._loop.create_task(self._write(job, self._engine.submit(plan)))
            except UsageError:
                job.release()
                raise
        else:
            task = self._loop.create_task(self._load(job))
        self._lanes[plan.direction].append(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job.transfer

    @property
    def bytes_in_flight(self) -> int:
        return sum(job.plan.total_bytes for lane in self._lanes.values() for job in lane)

    def statistics(self) -> CopyStatistics:
        """Those of the engine within; a load that was refused never came to it."""
        return self._engine.statistics()

    async def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            while lane:
                with suppress(TransferFailed):
                    await lane[-1].transfer
        await self._engine.close()
        for reader in self._readers.values():
            reader.shutdown()

    # --- one transfer ---------------------------------------------------------------------------------------------

    async def _write(self, job: "_Job", copy: Transfer) -> None:
        """Copies, then takes the checksums of what has arrived."""
        await self._follow(job, copy)
        if job.error is None:
            reading = self._loop.run_in_executor(self._readers[Direction.DEVICE_TO_HOST], _sums_of, _host_sides(job))
            for (memory, slots), sums in zip(_host_sides(job), await reading, strict=True):
                self._sums.setdefault(memory, {}).update(zip(slots, sums, strict=True))
        self._end(job)

    async def _load(self, job: "_Job") -> None:
        """Compares, then copies. Comparisons end in the order in which they began, so copies keep their order."""
        sides = _host_sides(job)
        expected = [[self._sums.get(memory, {}).get(slot) for slot in slots] for memory, slots in sides]
        found = await self._loop.run_in_executor(self._readers[Direction.HOST_TO_DEVICE], _sums_of, sides)
        for (memory, slots), known, sums in zip(sides, expected, found, strict=True):
            for slot, before, now in zip(slots, known, sums, strict=True):
                if before not in (None, now):
                    self.mismatches += 1
                    cause = f"page of slot {slot} in host pool {memory.geometry.name} has changed since it was written"
                    job.error = TransferFailed(job.plan.name, 0, cause)
        if job.error is None:
            try:
                await self._follow(job, self._engine.submit(job.plan))
            except UsageError as cause:
                job.error = TransferFailed(job.plan.name, 0, str(cause))
        self._end(job)

    async def _follow(self, job: "_Job", copy: Transfer) -> None:
        """Tells layer by layer what the engine within has done."""
        try:
            for layer in range(copy.layer_count):
                await copy.layer(layer)
                job.transfer.land(layer + 1)
            await copy
        except TransferFailed as failure:
            job.error = failure

    def _end(self, job: "_Job") -> None:
        """Settles from the oldest on, as far as they are over."""
        job.over = True
        lane = self._lanes[job.plan.direction]
        while lane and lane[0].over:
            first = lane.popleft()
            first.release()
            first.transfer.settle(first.error)


class _Job:
    __slots__ = ("error", "leases", "over", "plan", "transfer")

    def __init__(self, plan: CopyPlan, loop: asyncio.AbstractEventLoop) -> None:
        self.plan = plan
        self.leases = plan.lease()
        self.transfer = Transfer(plan.name, plan.layer_count, loop)
        self.error: TransferFailed | None = None
        self.over = False

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


def _host_sides(job: _Job) -> list[tuple[PageMemory, list[int]]]:
    """For each pool its host memory and the slots there, in the plan's order."""
    sides = []
    for pool in job.plan.pools:
        out = job.plan.direction is Direction.DEVICE_TO_HOST
        memory: Pages = pool.destination if out else pool.source
        assert isinstance(memory, PageMemory)
        firsts = [(to if out else origin, count) for origin, to, count in pool.runs]
        sides.append((memory, [slot for first, count in firsts for slot in range(first, first + count)]))
    return sides


def _sums_of(sides: Sequence[tuple[PageMemory, list[int]]]) -> list[list[int]]:
    """The checksum of every page, over all of its planes."""
    return [[page_sum(memory, slot) for slot in slots] for memory, slots in sides]


def page_sum(memory: PageMemory, slot: int) -> int:
    """64 bits over the bytes of one page in all planes of a memory. The layout does not enter."""
    digest = xxhash.xxh3_64()
    size_bytes, start = memory.geometry.plane_bytes, slot * memory.slot_stride
    with memory.buffer() as whole:
        for plane in memory.planes:
            first = plane - memory.base_address + start
            digest.update(whole[first : first + size_bytes])
    return digest.intdigest()
