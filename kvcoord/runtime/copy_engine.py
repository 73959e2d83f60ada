"""Puts the copy engine of one worker together: who copies, with which checks, and what goes wrong on purpose.

It does not know pages, plans, or what the copies are for.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvcoord.config.process import CopyEngineKind, WorkerConfig
from kvcoord.dma.checked import CheckedCopyEngine
from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.cuda import CudaCopyEngine
from kvcoord.dma.engine import CopyEngine
from kvcoord.dma.faults import CopyFaults, FaultyCopyEngine
from kvcoord.dma.jitter import JitteryDriver
from kvcoord.errors import ConfigError, DriverCallFailed
from kvcoord.memory.driver import Driver
from kvcoord.memory.libcuda import LibCuda
from kvcoord.memory.numa import placement, prefer
from kvcoord.memory.pages import PageMemory

log = logging.getLogger(__name__)

JITTER_DELAY_S = 0.001

MakeDriver = Callable[[int], tuple[Driver, Callable[[], None]]]
"""A driver for the GPU of this number, and how to close it."""


class WorkerCopyEngine:
    """`engine` is what copies are submitted to; `gpu`, with its `driver`, is within it where the GPU copies."""

    def __init__(
        self, engine: CopyEngine, gpu: CudaCopyEngine | None, driver: Driver | None, ending: ExitStack
    ) -> None:
        self.engine = engine
        self.gpu = gpu
        self.driver = driver
        self._ending = ending

    async def close(self) -> None:
        """Lets copies end, then gives everything back. May be called again."""
        await self.engine.close()
        self._ending.close()


def libcuda(number: int) -> tuple[Driver, Callable[[], None]]:
    """The GPU of this number, through its driver's library."""
    driver = LibCuda(number)
    return driver, driver.close


async def open_copy_engine(
    config: WorkerConfig,
    loop: asyncio.AbstractEventLoop,
    host: Sequence[PageMemory],
    layer_count: int,
    make_driver: MakeDriver = libcuda,
) -> WorkerCopyEngine:
    """The engine that the configuration asks for. With a GPU it locks the host memory first, which takes seconds.

    Raises ConfigError, with nothing left locked, when this host or its GPU cannot do it.
    """
    transfers_max = config.limits.operations_open_max
    if config.copies.engine is CopyEngineKind.CPU:
        _place(config, host, None)
        cpu = CpuCopyEngine(loop, transfers_open_max=transfers_max)
        return WorkerCopyEngine(_wrapped(config, loop, cpu), None, None, ExitStack())
    with ExitStack() as ending:
        driver, close_driver = make_driver(config.copies.cuda_device)
        ending.callback(close_driver)
        try:
            if config.copy_faults.jitter_bytes_max:
                jittery = JitteryDriver(
                    driver, config.copy_faults.jitter_bytes_max, JITTER_DELAY_S, config.copy_faults.seed + config.rank
                )
                ending.callback(jittery.close)
                driver = jittery
            gpu = CudaCopyEngine(
                loop,
                driver,
                layer_count,
                bytes_in_flight_max=config.copies.bytes_in_flight_max,
                transfers_open_max=transfers_max,
                shared_events=True,
            )
        except DriverCallFailed as cause:
            raise ConfigError("copies.cuda_device", config.copies.cuda_device, str(cause)) from cause
        try:
            _place(config, host, driver)
            for memory in host:
                await loop.run_in_executor(None, gpu.pin, memory)
        except ConfigError:
            await gpu.close()
            raise
        return WorkerCopyEngine(_wrapped(config, loop, gpu), gpu, driver, ending.pop_all())


def _place(config: WorkerConfig, host: Sequence[PageMemory], driver: Driver | None) -> None:
    """Before the host pools are touched for the first time: a page stays where it is then. A failure costs speed only.

    Raises ConfigError for a node that this host does not have.
    """
    try:
        bus_id = None if driver is None else driver.pci_bus_id
        chosen = placement(config.copies.numa_node, bus_id)
        if chosen.node is not None:
            for memory in host:
                prefer(memory, chosen.node)
    except (DriverCallFailed, OSError) as cause:
        log.warning("host pools stay where the system puts them: %s", cause)
        return
    where = "where the system puts them" if chosen.node is None else f"on NUMA node {chosen.node}"
    log.info("host pools go %s: %s", where, chosen.reason)


def _wrapped(config: WorkerConfig, loop: asyncio.AbstractEventLoop, engine: CopyEngine) -> CopyEngine:
    if config.copies.checksums:
        engine = CheckedCopyEngine(loop, engine)
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
