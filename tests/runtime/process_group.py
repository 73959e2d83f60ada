"""A group whose coordinators and workers are processes of their own, to be killed, stopped and started again."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from kvcoord.config import CoordinatorConfig, GroupConfig, LogLevel, Timeouts, WorkerConfig
from kvcoord.observability.snapshot import CoordinatorSnapshot, WorkerSnapshot
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children
from kvcoord.runtime.process import Ready
from kvcoord.runtime.status import ask

POOLS = [{"name": "kv", "page_bytes": 64, "layers": 4}]

PATIENT = Timeouts(
    heartbeat_interval_s=0.1,
    heartbeat_timeout_s=300.0,
    join_timeout_s=300.0,
    vote_timeout_s=300.0,
    round_timeout_s=300.0,
    copy_timeout_s=300.0,
    group_deadline_s=300.0,
    shutdown_timeout_s=300.0,
    linger_s=0.1,
)
"""Longer than any test: what is noticed is noticed without time running out. Tests of one limit replace that one, by
one that no healthy process reaches because the machine has stood still for some seconds.
"""


class ProcessGroup:
    """`async with ProcessGroup(folder, 2) as group`: one coordinator of the list and all workers serve.

    Options of `worker` and of the timeouts hold for every process that is started afterwards. `limit_ranks` is for
    limits at which ranks act by themselves: the coordinator keeps its patience with them.
    """

    def __init__(self, folder: Path, world_size: int, *, coordinators: int = 1, **group: Any) -> None:
        self.folder = folder
        self.group = msgspec.convert({"pools": POOLS, "world_size": world_size, **group}, GroupConfig)
        self.coordinators = [f"ipc://{folder}/c{index}.sock" for index in range(coordinators)]
        self.timeouts = self.rank_timeouts = PATIENT
        self.children = Children(keep_errors=True)
        self.running: dict[str, Child] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._variables: dict[int, Mapping[str, str]] = {}
        self.ready: dict[str, Ready] = {}

    async def __aenter__(self) -> Self:
        await self.children.__aenter__()
        try:
            await self.start()
        except BaseException:
            await self.children.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.children.__aexit__()

    async def start(self) -> None:
        """What serves when the block is entered."""
        await self.coordinator()
        for rank in range(self.group.world_size):
            await self.worker(rank)

    def limit(self, **timeouts: float) -> Self:
        """Sets timeouts."""
        self.timeouts = msgspec.structs.replace(self.timeouts, **timeouts)
        return self.limit_ranks(**timeouts)

    def limit_ranks(self, **timeouts: float) -> Self:
        """Sets timeouts of the workers only."""
        self.rank_timeouts = msgspec.structs.replace(self.rank_timeouts, **timeouts)
        return self

    def equip(self, rank: int, *, variables: Mapping[str, str] | None = None, **options: Any) -> Self:
        """What the worker of this rank is started with, besides what it is given then."""
        self._options[rank] = options
        if variables is not None:
            self._variables[rank] = variables
        return self

    async def coordinator(self, index: int = 0) -> None:
        """Starts one coordinator of the list."""
        config = CoordinatorConfig(
            bind=[self.coordinators[index]],
            http=None,
            recorder_dir=str(self.folder),
            timeouts=self.timeouts,
            log_level=LogLevel.ERROR,
        )
        await self._start(f"c{index}", "coordinator", config)

    async def worker(self, rank: int, **options: Any) -> None:
        """Starts the worker of one rank."""
        settings = {
            "group": self.group,
            "rank": rank,
            "listen": self.address(rank),
            "coordinators": self.coordinators,
            "device_pages": 32,
            "host_pages": 64,
            "http": None,
            "recorder_dir": str(self.folder),
            "timeouts": self.rank_timeouts,
            "log_level": LogLevel.ERROR,
            **self._options.get(rank, {}),
            **options,
        }
        config = msgspec.convert(msgspec.to_builtins(settings), WorkerConfig)
        await self._start(f"r{rank}", "worker", config, self._variables.get(rank))

    def address(self, rank: int) -> str:
        """Where the engine of this rank finds its worker."""
        return f"ipc://{self.folder}/r{rank}.sock"

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone. Names are c0, c1 ... and r0, r1 ..."""
        await self.running[name].kill()

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self.running[name].signal(signal.SIGSTOP)

    def carry_on(self, name: str) -> None:
        """SIGCONT."""
        self.running[name].signal(signal.SIGCONT)

    async def status(self, rank: int) -> WorkerSnapshot:
        snapshot = await ask(self.address(rank), 60.0)
        assert isinstance(snapshot, WorkerSnapshot)
        return snapshot

    async def until(self, rank: int, holds: Callable[[WorkerSnapshot], bool]) -> WorkerSnapshot:
        """Asks one worker until its status is as wanted. The test's own timeout bounds it."""
        while True:
            snapshot = await self.status(rank)
            if holds(snapshot):
                return snapshot

    async def voting(self) -> None:
        """Return when the coordinator has heard a vote, and not all of them. The test's own timeout bounds it."""
        while True:
            snapshot = await ask(self.coordinators[0], 60.0)
            assert isinstance(snapshot, CoordinatorSnapshot)
            if any(group.operations_open for group in snapshot.groups):
                return

    async def all_active(self) -> None:
        for rank in range(self.group.world_size):
            await self.until(rank, lambda snapshot: snapshot.state == "active")

    async def _start(
        self, name: str, command: str, config: msgspec.Struct, variables: Mapping[str, str] | None = None
    ) -> None:
        path = self.folder / f"{name}.yaml"
        path.write_bytes(msgspec.json.encode(config))
        environment = None if variables is None else os.environ | variables
        arguments = [*KVCOORD, command, "--config", str(path), *SERVE]
        child = await self.children.start(name, arguments, environment=environment)
        self.running[name] = child
        self.ready[name] = await child.ready()
