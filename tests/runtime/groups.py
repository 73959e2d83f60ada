"""Whole groups in one event loop: a coordinator and workers with real sockets, real memory and real copies."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from kvcoord.config import CoordinatorConfig, GroupConfig, Limits, WorkerConfig
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.runtime.worker import Worker
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport
from tests.runtime.process_group import PATIENT, POOLS


class Group:
    """A coordinator and its workers. `worker(rank)` starts one more of them, or the same rank once more.

    `limits` hold for all of them, `workers` are options of the workers.
    """

    def __init__(
        self,
        folder: Path,
        stack: AsyncExitStack,
        workers: Mapping[str, object] | None = None,
        limits: Limits | None = None,
        **group: object,
    ) -> None:
        self.folder = folder
        self._limits = limits or Limits()
        self._worker_options = workers or {}
        self.config = msgspec.convert({"pools": POOLS, **group}, GroupConfig)
        self.workers: list[Worker] = []
        self.lives_ended: list[int] = []
        """Ranks, each time an engine's life is over on one."""
        self._life_ended = asyncio.Event()
        self._stack = stack

    @property
    def coordinator_address(self) -> str:
        return f"ipc://{self.folder}/c.sock"

    def address(self, rank: int) -> str:
        """Where the engine of this rank finds its worker."""
        return f"ipc://{self.folder}/r{rank}.sock"

    async def coordinator(self) -> None:
        """Starts the coordinator."""
        config = CoordinatorConfig(
            bind=[self.coordinator_address],
            http=None,
            recorder_dir=str(self.folder),
            timeouts=PATIENT,
            limits=self._limits,
        )
        self._coordinator = Coordinator(config)
        await self._coordinator.open()
        self._stack.push_async_callback(self._coordinator.close)

    async def restart_coordinator(self) -> None:
        """Ends the coordinator, with all it knows, and starts another one at the same address."""
        await self._coordinator.close()
        await self.coordinator()

    def worker_config(self, rank: int, **options: object) -> WorkerConfig:
        settings = {
            "group": self.config,
            "rank": rank,
            "listen": self.address(rank),
            "coordinators": [self.coordinator_address],
            "recorder_dir": str(self.folder),
            "device_pages": 32,
            "host_pages": 64,
            "timeouts": PATIENT,
            "limits": self._limits,
            **self._worker_options,
            **options,
        }
        return WorkerConfig(**settings)  # type: ignore[arg-type]

    async def worker(self, rank: int, **options: object) -> Worker:
        config = self.worker_config(rank, **options)
        worker = Worker(
            config,
            UnixTransport(),
            ZeromqTransport(),
            FlightRecorder(f"rank{rank}", 1000),
            between_lives=partial(self._between_lives, rank),
        )
        self._stack.push_async_callback(worker.close)
        await worker.open()
        self.workers.append(worker)
        return worker

    async def lives_over(self, count: int) -> None:
        """Return when every rank has seen the end of this many engines, and nothing of them is left."""
        while any(self.lives_ended.count(rank) < count for rank in range(self.config.world_size)):
            self._life_ended.clear()
            await self._life_ended.wait()

    def _between_lives(self, rank: int) -> None:
        self.lives_ended.append(rank)
        self._life_ended.set()


@asynccontextmanager
async def group(
    folder: Path, workers: Mapping[str, object] | None = None, limits: Limits | None = None, **settings: object
) -> AsyncIterator[Group]:
    """A group with a coordinator and all its workers."""
    async with AsyncExitStack() as stack:
        made = Group(folder, stack, workers, limits, **settings)
        await made.coordinator()
        for rank in range(made.config.world_size):
            await made.worker(rank)
        yield made


async def ended(worker: Worker) -> Exception:
    """Why the worker cannot go on."""
    return await asyncio.shield(worker.ended)
