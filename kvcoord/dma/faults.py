"""Copies that go wrong on purpose, for tests and demonstrations: late, held back, or failing at a chosen layer.

It wraps any engine and keeps the engine's promises. It does not know how the wrapped engine copies.
"""

import asyncio
from collections import deque
from contextlib import suppress
from random import Random

import msgspec

from kvcoord.dma.engine import CopyEngine, CopyPlan, CopyStatistics, Direction
from kvcoord.dma.transfer import Transfer
from kvcoord.errors import TransferFailed, UsageError


class CopyFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong. A transfer starts `delay_s` plus a random part below `delay_random_s` late.

    `fail_at_layer` maps a transfer's name to its first layer that is reported as not landed. Every `fail_every`-th
    transfer, counted from 1, fails at its last layer; 0 for none.
    """

    delay_s: float = 0.0
    delay_random_s: float = 0.0
    seed: int = 0
    fail_at_layer: dict[str, int] = {}
    fail_every: int = 0


class FaultyCopyEngine:
    """A `CopyEngine` in front of another. Late, a transfer also holds up those behind it in its direction.

    A held transfer has not started: its bytes have not moved, and `close` waits for it. If its memory is closed
    meanwhile, it fails.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: CopyEngine, faults: CopyFaults) -> None:
        self._loop = loop
        self._engine = engine
        self._faults = faults
        self._random = Random(faults.seed)
        self._held: dict[str, asyncio.Event] = {}
        self._lanes: dict[Direction, deque[_Job]] = {direction: deque() for direction in Direction}
        self._tasks: dict[Direction, asyncio.Task[None]] = {}
        self._closed = False
        self._performed = 0

    def hold(self, name: str) -> None:
        """Keep transfers of this name from starting until `let_go`."""
        self._held.setdefault(name, asyncio.Event())

    def let_go(self, name: str) -> None:
        """Let them start. Raises UsageError when the name is not held."""
        if name not in self._held:
            raise UsageError("name", name, "is not held")
        self._held.pop(name).set()

    def submit(self, plan: CopyPlan) -> Transfer:
        if self._closed:
            raise UsageError("submit", plan.name, "this engine is closed")
        for lease in plan.lease():
            lease.release()
        delay_s = self._faults.delay_s + self._random.random() * self._faults.delay_random_s
        job = _Job(plan, Transfer(plan.name, plan.layer_count, self._loop), delay_s)
        lane = self._lanes[plan.direction]
        lane.append(job)
        if len(lane) == 1:
            self._tasks[plan.direction] = self._loop.create_task(self._perform_all(lane))
        return job.transfer

    @property
    def bytes_in_flight(self) -> int:
        return sum(job.plan.total_bytes for lane in self._lanes.values() for job in lane)

    def statistics(self) -> CopyStatistics:
        """Those of the engine within, which has copied also what was reported as failed on purpose."""
        return self._engine.statistics()

    async def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            while lane:
                with suppress(TransferFailed):
                    await lane[-1].transfer
        await self._engine.close()

    async def _perform_all(self, lane: "deque[_Job]") -> None:
        while lane:
            error = await self._perform(lane[0])
            lane.popleft().transfer.settle(error)

    async def _perform(self, job: "_Job") -> TransferFailed | None:
        name = job.plan.name
        if job.delay_s > 0:
            await asyncio.sleep(job.delay_s)
        if name in self._held:
            await self._held[name].wait()
        fail_at_layer = self._faults.fail_at_layer.get(name)
        self._performed += 1
        if self._faults.fail_every and self._performed % self._faults.fail_every == 0:
            fail_at_layer = job.plan.layer_count - 1
        try:
            copy = self._engine.submit(job.plan)
            for layer in range(copy.layer_count)[:fail_at_layer]:
                await copy.layer(layer)
                job.transfer.land(layer + 1)
            await copy
        except UsageError as cause:
            return TransferFailed(name, 0, str(cause))
        except TransferFailed as failure:
            return failure
        return None if fail_at_layer is None else TransferFailed(name, fail_at_layer, "failed on purpose")


class _Job(msgspec.Struct, frozen=True):
    plan: CopyPlan
    transfer: Transfer
    delay_s: float
