"""The copies of one worker: host memory, the engine's device memory, and the copy engine between them."""

import asyncio
from collections.abc import Callable

from kvcoord.config.process import WorkerConfig
from kvcoord.controller.effects import StartCopy
from kvcoord.dma.engine import CopyPlan, CopyStatistics, Direction, DirectionStatistics, PoolCopy
from kvcoord.dma.transfer import Transfer
from kvcoord.domain import OperationId, Rank, Reason, Tier
from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.protocol.local import Done, Register, Registered
from kvcoord.runtime.copy_engine import MakeDriver, WorkerCopyEngine, libcuda, open_copy_engine
from kvcoord.runtime.engine_memory import EngineMemory, map_memory
from kvcoord.runtime.host_memory import HostMemory

CopyEnded = Callable[[OperationId, Reason | None], None]


class Copies:
    """Performs StartCopy effects. `ended` is called on the loop when a copy is over, with a reason when it failed.

    A pool without layers on this rank has slots like any other, and no bytes.
    """

    def __init__(
        self,
        config: WorkerConfig,
        loop: asyncio.AbstractEventLoop,
        ended: CopyEnded,
        make_driver: MakeDriver = libcuda,
    ) -> None:
        self._config = config
        self._loop = loop
        self._ended = ended
        self._make_driver = make_driver
        group = config.group
        layers = [pool.layers_of_stage(group.stage(config.rank)) for pool in group.pools]
        self._numbers = [number for number, count in enumerate(layers) if count]
        """Positions among the group's pools of those that have layers here."""
        self._geometries = [
            PoolGeometry(pool.name, layers[number], pool.page_bytes, pool.dtype, pool.parts)
            for number, pool in enumerate(group.pools)
            if layers[number]
        ]
        self._host = HostMemory(config, self._geometries)
        self._following: set[asyncio.Task[None]] = set()
        self._device: EngineMemory | None = None
        self._copying: WorkerCopyEngine | None = None

    async def open(self) -> None:
        """Makes the host memory and what copies. Raises ConfigError when this host cannot do it."""
        try:
            slots = [self._config.host_slots[number] for number in self._numbers]
            self._host.open(slots)
            layer_count = max(geometry.layer_count for geometry in self._geometries)
            host = self._host.own
            self._copying = await open_copy_engine(self._config, self._loop, host, layer_count, self._make_driver)
        except BaseException:
            self._host.close()
            raise

    @property
    def reach(self) -> bytes:
        """How other ranks reach this rank's host memory, for `follow` there."""
        return self._host.reach

    def follow(self, named: dict[Rank, bytes], done: Callable[[ConfigError | None], None]) -> None:
        """Maps the host memory of other ranks. `done` is called on the loop, with the error if that cannot be done."""
        task = self._loop.create_task(self._follow(named, done))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, named: dict[Rank, bytes], done: Callable[[ConfigError | None], None]) -> None:
        assert self._copying is not None
        failed = None
        try:
            await self._host.follow(named, self._copying.gpu)
        except ConfigError as error:
            failed = error
        done(failed)

    def register(self, call: Register) -> Done | Registered:
        """Maps the engine's device pools. Raises UsageError, ConfigError or PeerUnavailable, and maps none then."""
        assert self._copying is not None
        self.unregister()
        gpu, driver = self._copying.gpu, self._copying.driver
        slots = [self._config.device_slots[number] for number in self._numbers]
        self._device = map_memory(call, self._geometries, slots, driver)
        if gpu is None or driver is None:
            return Done()
        gpu.follow(self._device.computed)
        return Registered(driver.export_event(gpu.written), [driver.export_event(event) for event in gpu.layers])

    def unregister(self) -> None:
        """Unmaps the engine's memory. Copies under way keep it mapped until they are over."""
        if self._device is None:
            return
        assert self._copying is not None
        if self._copying.gpu is not None:
            self._copying.gpu.follow(None)
        self._device.close()
        self._device = None

    def start(self, effect: StartCopy) -> Transfer | None:
        """Starts one copy. None: it could not start, and has failed."""
        if self._device is None or self._copying is None:
            self._loop.call_soon(self._ended, effect.operation, Reason.SOURCE_GONE)
            return None
        try:
            transfer = self._copying.engine.submit(self._plan(effect, self._device))
        except (UsageError, PeerUnavailable) as error:
            reason = Reason.COPY_FAILED if isinstance(error, UsageError) else Reason.SOURCE_GONE
            self._loop.call_soon(self._ended, effect.operation, reason)
            return None
        transfer.add_done_callback(self._settled)
        return transfer

    def statistics(self) -> CopyStatistics:
        if self._copying is None:
            return CopyStatistics(device_to_host=DirectionStatistics(), host_to_device=DirectionStatistics())
        return self._copying.engine.statistics()

    async def close(self) -> None:
        """Waits for what is under way, then unmaps everything."""
        for task in list(self._following):
            await task
        if self._copying is not None:
            await self._copying.close()
        self.unregister()
        self._host.close()

    def _plan(self, effect: StartCopy, device: EngineMemory) -> CopyPlan:
        out = effect.source is Tier.DEVICE
        pools: list[PoolCopy] = []
        for at, (number, on_device) in enumerate(zip(self._numbers, device.pages, strict=True)):
            copies = self._host.to_host if out else self._host.to_device
            pools += copies(at, on_device, effect.source_slots[number], effect.destination_slots[number])
        return CopyPlan(effect.operation, Direction.DEVICE_TO_HOST if out else Direction.HOST_TO_DEVICE, tuple(pools))

    def _settled(self, transfer: Transfer) -> None:
        self._ended(transfer.name, None if transfer.failed is None else Reason.COPY_FAILED)
