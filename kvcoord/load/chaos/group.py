"""The processes of a run under chaos: coordinators, and for each rank a worker, an engine and lines to them.

All are kept running as a service manager would. What they tell, and what is wrong with it, is collected here; what
befalls them is decided elsewhere.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config import CoordinatorConfig, Limits, LogLevel, Timeouts, WorkerConfig
from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.load.chaos.engine import ChaosReport, Finish, FromEngine, LifeEnded, Played
from kvcoord.load.chaos.link import Link
from kvcoord.load.dialogue import line
from kvcoord.load.plan import ReplayOptions, ReplayPlan, plan_replay, worker_address
from kvcoord.load.supervisor import Kept, Start
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children

COORDINATORS: Final = 2

TIMEOUTS: Final = Timeouts(
    heartbeat_interval_s=0.1,
    heartbeat_timeout_s=1.0,
    gather_timeout_s=1.5,
    join_timeout_s=60.0,
    prepare_timeout_s=2.0,
    vote_timeout_s=2.0,
    round_timeout_s=4.0,
    copy_timeout_s=4.0,
    group_deadline_s=40.0,
    shutdown_timeout_s=3.0,
    linger_s=0.2,
    connect_timeout_s=1.0,
)

CALL_TIMEOUT_S: Final = 60.0
"""No call may take so long: a group that does not come together is lost before."""

JITTER_S: Final = 0.01
"""Steps begin up to this much late, so that the machine is not busy with the trace alone."""

LIMITS: Final = Limits(recorder_events_max=2048, decisions_kept_max=1024)
"""Whatever is kept is full soon, so that memory that grows is seen."""

MISBEHAVED: Final = frozenset({"Diverged", "JoinRefused", "DeadlineExceeded", "UsageError", "ConfigError"})
"""Errors that no fault of a process or a line excuses."""


class ChaosGroup:
    """`violations` says what must not have happened. `on_progress` is called when an engine has told how far it is."""

    def __init__(self, folder: Path, children: Children, ranks: int, *, replicated: bool) -> None:
        self.ranks = range(ranks)
        self.violations: list[str] = []
        self.lives_ended: dict[str, int] = {}
        self.played = dict.fromkeys(self.ranks, 0)
        self.reports: dict[int, ChaosReport] = {}
        self.coordinators: list[Kept] = []
        self.workers: list[Kept] = []
        self.engines: list[Kept] = []
        self.links: dict[tuple[int, int], Link] = {}
        self.on_progress: Callable[[], None] = lambda: None
        self.plan: ReplayPlan = plan_replay(
            ReplayOptions(ranks=ranks, replicated=replicated, jitter_s=dict.fromkeys(self.ranks, JITTER_S))
        )
        self._folder = folder
        self._children = children
        self._decoder: msgspec.json.Decoder[FromEngine] = msgspec.json.Decoder(FromEngine)
        self._keeping: list[asyncio.Task[None]] = []
        self._listening: set[asyncio.Task[None]] = set()
        self._finish: Finish | None = None
        self._reported = asyncio.Event()

    async def start(self) -> None:
        """Starts everything. Raises what starting a process raises."""
        for index in range(COORDINATORS):
            self.coordinators.append(await self._keep(partial(self._start_coordinator, index)))
        for rank in self.ranks:
            for index in range(COORDINATORS):
                link = self.links[rank, index] = Link(self._link(rank, index), self._socket(index))
                await link.open()
            self.workers.append(await self._keep(partial(self._start_worker, rank)))
        for rank in self.ranks:
            self.engines.append(await self._keep(partial(self._start_engine, rank)))

    async def finish(self, at: int, limit_s: float) -> list[ChaosReport]:
        """Has every engine play up to this request and report. Raises DeadlineExceeded."""
        self._finish = Finish(at)
        for kept in self.engines:
            kept.child.say(line(self._finish))
        try:
            async with asyncio.timeout(limit_s):
                await self._reported.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"reports of all engines (of ranks {sorted(self.reports)})", "limit", limit_s
            ) from error
        return [self.reports[rank] for rank in self.ranks]

    async def close(self) -> None:
        """Keeps nothing running any more, and closes the links; the processes are ended by their owner."""
        for child in self._children.all():
            child.ending = True
        tasks = [*self._keeping, *self._listening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self.links.values():
            await link.close()

    # --- processes ------------------------------------------------------------------------------------------------

    async def _keep(self, start: Start) -> Kept:
        kept = Kept(await start(), start, self._children, self._died)
        task = asyncio.create_task(kept.run())
        task.add_done_callback(self._not_kept)
        self._keeping.append(task)
        return kept

    def _not_kept(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.violations.append(f"a process could not be started again: {error}")

    async def _died(self, child: Child) -> None:
        if child.code != child.expected:
            self.violations.append(f"ended by itself: {await child.death()}")

    async def _start_coordinator(self, index: int) -> Child:
        config = CoordinatorConfig(
            bind=[f"unix://{self._socket(index)}"],
            http=None,
            recorder_dir=str(self._folder),
            timeouts=TIMEOUTS,
            limits=LIMITS,
            log_level=LogLevel.ERROR,
        )
        return await self._serve(f"coordinator {index}", "coordinator", config)

    async def _start_worker(self, rank: int) -> Child:
        config = WorkerConfig(
            group=self.plan.group,
            rank=rank,
            listen=worker_address(self._folder, rank),
            coordinators=[f"unix://{self._link(rank, index)}" for index in range(COORDINATORS)],
            device_pages=self.plan.device_pages[rank],
            host_pages=self.plan.host_pages[rank],
            http=None,
            recorder_dir=str(self._folder),
            timeouts=TIMEOUTS,
            limits=LIMITS,
            log_level=LogLevel.ERROR,
        )
        return await self._serve(f"worker {rank}", "worker", config)

    async def _start_engine(self, rank: int) -> Child:
        child = await self._children.start(
            f"engine {rank}", ["-m", "kvcoord.load.chaos.engine"], talks=True, generation=1
        )
        plan = self.plan.driver(rank, self._folder, -1, -1)
        child.say(line(msgspec.structs.replace(plan, call_timeout_s=CALL_TIMEOUT_S)))
        if self._finish is not None:
            child.say(line(self._finish))
        task = asyncio.create_task(self._listen(rank, child))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)
        return child

    async def _serve(self, name: str, command: str, config: msgspec.Struct) -> Child:
        path = self._folder / f"{name.replace(' ', '')}.yaml"
        path.write_bytes(msgspec.json.encode(config))
        child = await self._children.start(name, [*KVCOORD, command, "--config", str(path), *SERVE])
        await child.ready()
        return child

    def _socket(self, index: int) -> Path:
        return self._folder / f"c{index}.sock"

    def _link(self, rank: int, index: int) -> Path:
        return self._folder / f"l{rank}-{index}.sock"

    # --- engines --------------------------------------------------------------------------------------------------

    async def _listen(self, rank: int, child: Child) -> None:
        """Until this life of the engine's process is over."""
        while True:
            try:
                said = self._decoder.decode(await child.hear())
            except PeerUnavailable:
                return
            if isinstance(said, Played):
                self.played[rank] = said.requests
                self.on_progress()
            elif isinstance(said, LifeEnded):
                self._life_ended(rank, said)
            elif isinstance(said, ChaosReport):
                self.reports[rank] = said
                if len(self.reports) == len(self.ranks):
                    self._reported.set()

    def _life_ended(self, rank: int, said: LifeEnded) -> None:
        self.lives_ended[said.error] = self.lives_ended.get(said.error, 0) + 1
        if said.error in MISBEHAVED:
            self.violations.append(f"engine {rank}: {said.error}: {said.text}")
