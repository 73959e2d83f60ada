"""One direction of a GPU's copies: its stream, the transfers waiting for room on it and under way on it, its thread.

The thread parks in the driver, on one event after the other, and never looks twice; it is the only way news of the GPU
comes to the loop, so no Python ever runs inside the driver. It knows nothing of other directions nor of pages.
"""

import asyncio
import threading
from collections import deque
from queue import SimpleQueue

from kvcoord.dma.engine import CopyPlan, Direction, DirectionStatistics
from kvcoord.dma.transfer import Transfer
from kvcoord.dma.wakeup import Wakeup
from kvcoord.errors import DriverCallFailed, TransferFailed
from kvcoord.memory.driver import Driver, Event

Step = tuple[int, int]
"""First layer and the one after the last of what is put on the stream at once, and told by one event."""


class Job:
    """One plan on its way. `begun` and `marks`, one for each step, are set when it is put on its stream.

    The lane's thread writes `layers_landed`, `error` and, last, `over`.
    """

    __slots__ = ("begun", "error", "landing", "layers_landed", "leases", "marks", "over", "plan", "started", "transfer")

    def __init__(self, plan: CopyPlan, loop: asyncio.AbstractEventLoop) -> None:
        self.plan = plan
        self.leases = plan.lease()
        self.transfer = Transfer(plan.name, plan.layer_count, loop)
        self.begun: Event | None = None
        self.marks: list[Event] = []
        self.landing: list[int] = []
        """Layers that have landed when the mark of the same position is reached."""
        self.started: asyncio.Future[None] | None = None
        self.layers_landed = 0
        self.error: TransferFailed | None = None
        self.over = False

    def steps(self) -> list[Step]:
        """A load-back is read layer by layer while it goes on; what is written out is told of once, at its end."""
        layer_count = self.transfer.layer_count
        if self.plan.direction is Direction.HOST_TO_DEVICE:
            return [(layer, layer + 1) for layer in range(layer_count)]
        return [(0, layer_count)]


class Lane:
    """Transfers of one direction, in submission order until they settle, and the totals of those that have."""

    def __init__(self, driver: Driver, direction: Direction, wakeup: Wakeup, *, urgent: bool) -> None:
        self.stream = driver.open_stream(urgent=urgent)
        self.jobs: deque[Job] = deque()
        self.waiting: deque[Job] = deque()
        """Those not on the stream yet; they are the last of `jobs`."""
        self.bytes_open = self.bytes_issued = 0
        self._driver = driver
        self._name = f"kvcoord-{direction}"
        self._wakeup = wakeup
        self._issued: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._transfers = self._failed = self._copied_bytes = self._runs = 0
        self._copying_s = 0.0

    def open(self, job: Job) -> None:
        self.jobs.append(job)
        self.waiting.append(job)
        self.bytes_open += job.plan.total_bytes

    def watch(self, job: Job) -> None:
        """The oldest waiting job is on the stream, or has failed to get there: the thread tells when it is over."""
        self.bytes_issued += job.plan.total_bytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._issued.put(job)

    def end_thread(self) -> None:
        if self._thread is not None:
            self._issued.put(None)
            self._thread.join()
            self._thread = None

    def take_over(self) -> list[Job]:
        """The jobs that are over, oldest first, no longer in the lane; the oldest open one is told its progress."""
        ended: list[Job] = []
        while self.jobs and self.jobs[0].over:
            job = self.jobs.popleft()
            self.bytes_open -= job.plan.total_bytes
            self.bytes_issued -= job.plan.total_bytes
            ended.append(job)
        if self.jobs and self.jobs[0].layers_landed:
            self.jobs[0].transfer.land(self.jobs[0].layers_landed)
        return ended

    def count(self, job: Job, copying_s: float) -> None:
        """Enters a job that is over into the totals."""
        self._transfers += 1
        self._copying_s += copying_s
        if job.error is None:
            self._copied_bytes += job.plan.total_bytes
            self._runs += job.plan.run_count
        else:
            self._failed += 1

    def statistics(self) -> DirectionStatistics:
        return DirectionStatistics(
            transfers=self._transfers,
            failed=self._failed,
            copied_bytes=self._copied_bytes,
            runs=self._runs,
            copying_s=self._copying_s,
        )

    def _work(self) -> None:
        while (job := self._issued.get()) is not None:
            self._follow(job)
            del job  # The next wait may be long; a copy that is over must not keep its memories.

    def _follow(self, job: Job) -> None:
        for number, mark in enumerate(job.marks):
            try:
                self._driver.synchronize(mark)
            except DriverCallFailed as cause:
                job.error = job.error or TransferFailed(job.plan.name, job.layers_landed, str(cause))
                break
            if number < len(job.landing):
                job.layers_landed = job.landing[number]
                if job.transfer.layers_awaited and number + 1 < len(job.marks):
                    self._wakeup.wake_from_thread()
        job.over = True
        self._wakeup.wake_from_thread()
