"""Copies between a GPU and pinned host memory: a stream for each direction, ordered against the engine by events.

Four orders hold between the engine's stream and the two copy streams, all of them kept on the GPU:

    the engine computes a page    before   it is written out      the copy waits for `follow`'s event
    a page is written out         before   the engine reuses it   the engine waits for `written`
    the engine has read a page    before   a load overwrites it   the copy waits for `follow`'s event
    a layer is loaded             before   the engine reads it    the engine waits for `layers[layer]`

The engine records its event before it asks for a copy; it puts its waits on its stream after it knows that the copy
has been started. An event may be recorded anew meanwhile: its wait then lasts longer, never shorter, since a stream
goes on in order. What one copy leaves to the next (a host page written, then loaded) is ordered by whoever submits,
who learns from the transfer that the first is over.

Load-backs are put on their stream layer by layer, with an event after each; the pieces of a step go to the driver in
one call. Times are the GPU's own. A transfer waits its turn while more than `bytes_in_flight_max` bytes are on its
stream, so that what is put there is started soon; each direction has its own count, and loads have the priority, so a
load-back never queues behind writes. It needs neither torch nor knows votes, slots' owners or operations.
"""

import asyncio
from array import array
from contextlib import suppress
from typing import Final

from kvcoord.dma.engine import CopyPlan, CopyStatistics, Direction
from kvcoord.dma.lanes import Job, Lane, Step
from kvcoord.dma.transfer import Transfer
from kvcoord.dma.wakeup import Wakeup
from kvcoord.errors import DriverCallFailed, TransferFailed, UsageError
from kvcoord.memory.driver import Addresses, Driver, Event, Stream
from kvcoord.memory.pages import PageMemory, Pages
from kvcoord.memory.pinned import CHUNK_BYTES, Pinned

BYTES_IN_FLIGHT_MAX: Final = 256 << 20
"""Some milliseconds of copying at the speed of a PCIe 5 link: deep enough that a stream never runs dry."""

TRANSFERS_OPEN_MAX: Final = 4096


class CudaCopyEngine:
    """The `CopyEngine` of one GPU.

    `written` is recorded after each transfer to the host, `layers[i]` after layer i of each load; `shared_events`: they
    can be named to the engine's process. `layer_count` is that of the pool with the most layers. Host memory that was
    not pinned is copied too, but by a detour of the driver's that holds up the calling thread.
    Raises DriverCallFailed when the driver cannot begin.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        layer_count: int,
        *,
        bytes_in_flight_max: int = BYTES_IN_FLIGHT_MAX,
        transfers_open_max: int = TRANSFERS_OPEN_MAX,
        shared_events: bool = False,
    ) -> None:
        self._loop = loop
        self._driver = driver
        self._bytes_in_flight_max = bytes_in_flight_max
        self._transfers_open_max = transfers_open_max
        self._wakeup = Wakeup(loop, self._settle_over)
        self._lanes = {
            direction: Lane(driver, direction, self._wakeup, urgent=direction is Direction.HOST_TO_DEVICE)
            for direction in Direction
        }
        self._spare: list[Event] = []
        self._followed: Event | None = None
        self._pinned: dict[int, Pinned] = {}
        self._closed = False
        self._ended = False
        self.written = driver.make_event(shared=shared_events)
        self.layers = [driver.make_event(shared=shared_events) for _ in range(layer_count)]

    # --- the engine's stream --------------------------------------------------------------------------------------

    def follow(self, event: Event | None) -> None:
        """Copies submitted from now on wait for this event, which the engine records before it asks. None: for none."""
        self._followed = event

    async def started(self, transfer: Transfer) -> None:
        """Wait until a transfer of this engine is on its stream: only then does another stream's wait mean it."""
        job = self._job(transfer)
        if job is not None and job in self._lanes[job.plan.direction].waiting:
            job.started = job.started or self._loop.create_future()
            await asyncio.shield(job.started)

    def wait_layer(self, stream: Stream, transfer: Transfer, layer: int) -> None:
        """What `stream` is given from now on begins after this layer has been loaded.

        Raises UsageError for a transfer that has not been started, a write, or a layer that it has not, TransferFailed
        when it is known to have failed.
        """
        if not 0 <= layer < transfer.layer_count:
            raise UsageError("layer", layer, f"transfer {transfer.name} has layers 0 to {transfer.layer_count - 1}")
        job = self._job(transfer)
        if job is None:
            return
        if job.plan.direction is not Direction.HOST_TO_DEVICE:
            raise UsageError("transfer", transfer.name, "is a write: wait_written waits for these")
        if job in self._lanes[Direction.HOST_TO_DEVICE].waiting:
            raise UsageError("transfer", transfer.name, "has not been started: await started first")
        if job.error is not None:
            raise TransferFailed(job.error.transfer, job.error.layer, job.error.cause)
        self._driver.wait(stream, self.layers[layer])

    def wait_written(self, stream: Stream) -> None:
        """What `stream` is given from now on begins after all writes that have been started are over."""
        self._driver.wait(stream, self.written)

    # --- host memory ----------------------------------------------------------------------------------------------

    def pin(self, memory: PageMemory, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Lock host memory in place until `unpin` or `close`. May take seconds, in another thread before it is copied.

        Raises ConfigError when the driver refuses; nothing of it is locked then.
        """
        self._pinned[memory.base_address] = Pinned(self._driver, memory, chunk_bytes)

    def unpin(self, memory: PageMemory) -> None:
        """Unlocks what `pin` has locked, before it is closed. No copy of it may run."""
        pinned = self._pinned.pop(memory.base_address, None)
        if pinned is not None:
            pinned.unpin()

    # --- copies ---------------------------------------------------------------------------------------------------

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
        if plan.layer_count > len(self.layers):
            raise UsageError("layer_count", plan.layer_count, f"this engine was made for {len(self.layers)} layers")
        if sum(len(lane.jobs) for lane in self._lanes.values()) >= self._transfers_open_max:
            raise UsageError("transfers_open_max", self._transfers_open_max, "await open transfers before more")
        job = Job(plan, self._loop)
        lane = self._lanes[plan.direction]
        lane.open(job)
        self._issue_waiting(lane)
        return job.transfer

    async def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            while lane.jobs:
                with suppress(TransferFailed):
                    await lane.jobs[-1].transfer
        if self._ended:
            return
        self._ended = True
        for lane in self._lanes.values():
            lane.end_thread()
        with suppress(DriverCallFailed):  # A broken driver keeps nothing that could be given back.
            for lane in self._lanes.values():
                self._driver.close_stream(lane.stream)
            for event in (*self._spare, *self.layers, self.written):
                self._driver.drop_event(event)
        for pinned in self._pinned.values():
            pinned.unpin()
        self._pinned.clear()

    # --- issuing --------------------------------------------------------------------------------------------------

    def _issue_waiting(self, lane: Lane) -> None:
        """Puts waiting transfers on the stream as far as there is room; one alone always has."""
        while lane.waiting:
            size_bytes = lane.waiting[0].plan.total_bytes
            if lane.bytes_issued and lane.bytes_issued + size_bytes > self._bytes_in_flight_max:
                return
            job = lane.waiting.popleft()
            self._issue(job, lane.stream)
            lane.watch(job)
            if job.started is not None and not job.started.done():
                job.started.set_result(None)

    def _issue(self, job: Job, stream: Stream) -> None:
        """All steps of one transfer. What has been put on the stream before an error has its mark all the same."""
        driver = self._driver
        landed = 0
        try:
            if self._followed is not None:
                driver.wait(stream, self._followed)
            job.begun = self._event()
            driver.record(job.begun, stream)
            for step in job.steps():
                try:
                    self._copy_step(job, step, stream)
                finally:
                    self._mark(job, stream)
                landed = step[1]
                job.landing.append(landed)
                self._tell_engine(job, step, stream)
        except DriverCallFailed as cause:
            job.error = TransferFailed(job.plan.name, landed, str(cause))

    def _mark(self, job: Job, stream: Stream) -> None:
        mark = self._event()
        job.marks.append(mark)
        self._driver.record(mark, stream)

    def _tell_engine(self, job: Job, step: Step, stream: Stream) -> None:
        if job.plan.direction is Direction.HOST_TO_DEVICE:
            self._driver.record(self.layers[step[0]], stream)
        else:
            self._driver.record(self.written, stream)

    def _copy_step(self, job: Job, step: Step, stream: Stream) -> None:
        for pool in job.plan.pools:
            sources, destinations, sizes = array("Q"), array("Q"), array("Q")
            lengths = [size_bytes for _, _, size_bytes in pool.pieces]
            for pairs in pool.layers[step[0] : step[1]]:
                for source, destination in pairs:
                    sources.extend([source + offset for offset, _, _ in pool.pieces])
                    destinations.extend([destination + offset for _, offset, _ in pool.pieces])
                    sizes.extend(lengths)
            if sizes:
                if job.plan.direction is Direction.DEVICE_TO_HOST:
                    destinations, sources, sizes = self._cut(pool.destination, destinations, sources, sizes)
                else:
                    sources, destinations, sizes = self._cut(pool.source, sources, destinations, sizes)
                self._driver.copy(stream, sources, destinations, sizes)

    def _cut(
        self, host: Pages, inside: Addresses, other: Addresses, sizes: Addresses
    ) -> tuple[Addresses, Addresses, Addresses]:
        """The same pieces, none of them across two chunks of pinned memory."""
        pinned = self._pinned.get(host.planes[0])
        return (inside, other, sizes) if pinned is None else pinned.cut(inside, other, sizes)

    # --- settling -------------------------------------------------------------------------------------------------

    def _settle_over(self) -> None:
        for lane in self._lanes.values():
            for job in lane.take_over():
                self._settle(lane, job)
            self._issue_waiting(lane)

    def _settle(self, lane: Lane, job: Job) -> None:
        for lease in job.leases:
            lease.release()
        lane.count(job, self._elapsed_s(job))
        self._spare += job.marks
        if job.begun is not None:
            self._spare.append(job.begun)
        if job.error is not None:
            job.transfer.land(job.layers_landed)
        job.transfer.settle(job.error)

    def _elapsed_s(self, job: Job) -> float:
        if job.begun is None or not job.marks:
            return 0.0
        with suppress(DriverCallFailed):
            return self._driver.elapsed_s(job.begun, job.marks[-1])
        return 0.0

    # --- small things ---------------------------------------------------------------------------------------------

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else self._driver.make_event(shared=False)

    def _job(self, transfer: Transfer) -> Job | None:
        """The job of a transfer that has not settled."""
        for lane in self._lanes.values():
            for job in lane.jobs:
                if job.transfer is transfer:
                    return job
        return None
