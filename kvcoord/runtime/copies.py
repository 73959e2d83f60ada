"""The copies of one worker: host memory, the engine's device memory, and the copy engine between them."""

import asyncio
from collections.abc import Callable

from kvcoord.config.process import WorkerConfig
from kvcoord.controller.effects import StartCopy
from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.engine import CopyEngine, CopyPlan, CopyStatistics, Direction, PoolCopy
from kvcoord.dma.faults import CopyFaults, FaultyCopyEngine
from kvcoord.dma.transfer import Transfer
from kvcoord.domain import OperationId, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedHandle, attach
from kvcoord.protocol.local import Memory

CopyEnded = Callable[[OperationId, Reason | None], None]


class Copies:
    """Performs StartCopy effects. `ended` is called on the loop when a copy is over, with a reason when it failed."""

    def __init__(self, config: WorkerConfig, loop: asyncio.AbstractEventLoop, ended: CopyEnded) -> None:
        self._loop = loop
        self._ended = ended
        self._geometries = [
            PoolGeometry(pool.name, pool.layers, pool.page_bytes, pool.dtype) for pool in config.group.pools
        ]
        self._device_pages = config.device_pages
        self._host = [PageMemory.anonymous(geometry, config.host_pages) for geometry in self._geometries]
        self._device: list[PageMemory] = []
        self._engine = _engine(config, loop)

    def register(self, memory: list[Memory]) -> None:
        """Maps the engine's device pools. Raises UsageError, ConfigError or PeerUnavailable, and maps none then."""
        if len(memory) != len(self._geometries):
            names = [geometry.name for geometry in self._geometries]
            raise UsageError("memory", len(memory), f"register one memory for each of the pools {names}")
        self.unregister()
        mapped: list[PageMemory] = []
        try:
            for handle, geometry in zip(memory, self._geometries, strict=True):
                if handle.pool != geometry.name:
                    raise UsageError("memory.pool", handle.pool, f"pools come in the group's order: {geometry.name!r}")
                shared = SharedHandle(
                    handle.pid, handle.fd, handle.inode, handle.size_bytes, geometry, self._device_pages
                )
                mapped.append(attach(shared))
        except Exception:
            for pages in mapped:
                pages.close()
            raise
        self._device = mapped

    def unregister(self) -> None:
        """Unmaps the engine's memory. Copies under way keep it mapped until they are over."""
        for memory in self._device:
            memory.close()
        self._device = []

    def start(self, effect: StartCopy) -> Transfer | None:
        """Starts one copy. None: it could not start, and has failed."""
        if not self._device:
            self._loop.call_soon(self._ended, effect.operation, Reason.SOURCE_GONE)
            return None
        out = effect.source is Tier.DEVICE
        sources, destinations = (self._device, self._host) if out else (self._host, self._device)
        direction = Direction.DEVICE_TO_HOST if out else Direction.HOST_TO_DEVICE
        pools = zip(sources, destinations, effect.source_slots, effect.destination_slots, strict=True)
        try:
            plan = CopyPlan(effect.operation, direction, tuple([PoolCopy(*pool) for pool in pools]))
            transfer = self._engine.submit(plan)
        except UsageError:
            self._loop.call_soon(self._ended, effect.operation, Reason.COPY_FAILED)
            return None
        transfer.add_done_callback(self._settled)
        return transfer

    def statistics(self) -> CopyStatistics:
        return self._engine.statistics()

    async def close(self) -> None:
        """Waits for copies under way, then unmaps everything."""
        await self._engine.close()
        self.unregister()
        for memory in self._host:
            memory.close()

    def _settled(self, transfer: Transfer) -> None:
        self._ended(transfer.name, None if transfer.failed is None else Reason.COPY_FAILED)


def _engine(config: WorkerConfig, loop: asyncio.AbstractEventLoop) -> CopyEngine:
    engine = CpuCopyEngine(loop, transfers_open_max=config.limits.operations_open_max)
    faults = config.copy_faults
    if not (faults.delay_s or faults.delay_random_s or faults.fail_every):
        return engine
    wrapped = CopyFaults(
        delay_s=faults.delay_s,
        delay_random_s=faults.delay_random_s,
        seed=faults.seed + config.rank,
        fail_every=faults.fail_every,
    )
    return FaultyCopyEngine(loop, engine, wrapped)
