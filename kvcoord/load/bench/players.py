"""The processes of a load: a coordinator, and for each rank a worker and an engine to which requests arrive.

They live in a folder of their own and end with the block. It knows neither rates nor what a run has shown.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.load.bench.arrivals import ArrivalsPlan, Begin, FromEngine, Opened, Stage, Told
from kvcoord.load.bench.bed import write_config
from kvcoord.load.dialogue import line
from kvcoord.load.plan import CALL_TIMEOUT_S, ReplayPlan, worker_address
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children

LEAD_S: Final = 0.1
"""From telling the engines to begin to their first step: all have read it by then."""


class Heard(msgspec.Struct, frozen=True):
    """What one engine told, and when: seconds since the beginning."""

    at_s: float
    said: Told


class Players:
    """Processes that are ready. Open them with `players`."""

    def __init__(self, services: list[Child], engines: list[Child]) -> None:
        self.pids = {child.name: child.pid for child in (*services, *engines)}
        self._engines = engines

    def begin(self) -> float:
        """The engines begin together. Returns when, on the system's monotonic clock."""
        begun_s = time.monotonic() + LEAD_S
        for engine in self._engines:
            engine.say(line(Begin(begun_s)))
        return begun_s

    async def listen(self, begun_s: float, on_heard: Callable[[int, Heard], None]) -> None:
        """Calls `on_heard` with rank and word until all engines have played to their end."""
        async with asyncio.TaskGroup() as tasks:
            for rank, engine in enumerate(self._engines):
                tasks.create_task(_listen(engine, rank, begun_s, on_heard))

    async def finish(self) -> None:
        """Lets the engines end. Raises when one has failed."""
        for engine in self._engines:
            await engine.finish()


@asynccontextmanager
async def players(plan: ReplayPlan, stages: list[Stage], step_s: float) -> AsyncIterator[Players]:
    """Starts everything, until all engines are connected."""
    with tempfile.TemporaryDirectory(prefix="kvcoord-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children:
            services = await _start_services(children, plan, folder)
            yield Players(services, await _start_engines(children, plan, folder, stages, step_s))


async def _start_services(children: Children, plan: ReplayPlan, folder: Path) -> list[Child]:
    path = write_config(folder, "coordinator", plan.coordinator(0, folder))
    services = [await children.start("coordinator", [*KVCOORD, "coordinator", "--config", path, *SERVE])]
    for rank in range(plan.group.world_size):
        path = write_config(folder, f"rank{rank}", plan.worker(rank, folder))
        services.append(await children.start(f"worker {rank}", [*KVCOORD, "worker", "--config", path, *SERVE]))
    for service in services:
        await service.ready()
    return services


async def _start_engines(
    children: Children, plan: ReplayPlan, folder: Path, stages: list[Stage], step_s: float
) -> list[Child]:
    engines = []
    for rank in range(plan.group.world_size):
        engine = await children.start(f"engine {rank}", ["-m", "kvcoord.load.bench.arrivals"], talks=True, generation=1)
        arrivals = ArrivalsPlan(
            rank=rank,
            address=worker_address(folder, rank),
            trace=plan.options.trace,
            stages=stages,
            step_s=step_s,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        engine.say(line(arrivals))
        engines.append(engine)
    for engine in engines:
        assert isinstance(msgspec.json.decode(await engine.hear(), type=FromEngine), Opened)
    return engines


async def _listen(engine: Child, rank: int, begun_s: float, on_heard: Callable[[int, Heard], None]) -> None:
    over = False
    while not over:
        said = msgspec.json.decode(await engine.hear(), type=FromEngine)
        assert isinstance(said, Told)
        on_heard(rank, Heard(time.monotonic() - begun_s, said))
        over = said.done
