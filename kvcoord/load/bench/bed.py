"""The processes of an agreement benchmark: a coordinator, a star's hub, a worker and a rank process for each rank.

They live in a folder of their own and end with the block. All ranks perform the same blocks; nothing else runs
meanwhile.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config.process import CoordinatorConfig, LogLevel, WorkerConfig
from kvcoord.load.bench.dialogue import Block, FromRank, RankPlan, Timed
from kvcoord.load.bench.subjects import PAGES, group_config
from kvcoord.load.dialogue import line
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children

START_TIMEOUT_S: Final = 180.0
"""Every rank process loads torch; on a busy machine that takes most of it."""

LEAD_S: Final = 0.02
"""From telling the ranks of a block to its beginning: all have read it by then."""


class Bed:
    """Ranks that are ready to be timed. Open it with `open_bed`."""

    def __init__(self, ranks: list[Child], *, gloo: bool) -> None:
        self.gloo = gloo
        self._ranks = ranks
        self._blocks = 0
        self._decoder: msgspec.json.Decoder[FromRank] = msgspec.json.Decoder(FromRank)

    async def measure(self, block: Block) -> list[list[float]]:
        """Performs one block on all ranks. Returns microseconds by rank. Its number and start are set here."""
        self._blocks += 1
        started = msgspec.structs.replace(block, number=self._blocks, start_s=time.monotonic() + LEAD_S)
        for rank in self._ranks:
            rank.say(line(started))
        timed = [self._decoder.decode(await rank.hear()) for rank in self._ranks]
        return [[ns / 1000 for ns in said.ns] for said in timed if isinstance(said, Timed)]


@asynccontextmanager
async def open_bed(ranks: int, lags: list[int], *, sidecar: bool, gloo: bool = True) -> AsyncIterator[Bed]:
    """Starts everything. `gloo` has no effect where torch is not installed."""
    gloo = gloo and find_spec("torch") is not None
    with tempfile.TemporaryDirectory(prefix="kvcoord-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children, asyncio.timeout(None) as limit:
            limit.reschedule(asyncio.get_running_loop().time() + START_TIMEOUT_S)
            await _start_services(children, folder, ranks, sidecar=sidecar)
            members = [
                await children.start(f"rank {rank}", ["-m", "kvcoord.load.bench.rank"], talks=True)
                for rank in range(ranks)
            ]
            for rank, member in enumerate(members):
                plan = RankPlan(
                    rank=rank,
                    ranks=ranks,
                    coordinator=_coordinator(folder),
                    lags=lags,
                    sidecar=_worker(folder, rank) if sidecar else "",
                    gloo_store=str(folder / "gloo") if gloo else "",
                    star_path=str(folder / "star"),
                )
                member.say(line(plan))
            for member in members:
                await member.hear()
            limit.reschedule(None)
            yield Bed(members, gloo=gloo)


async def _start_services(children: Children, folder: Path, ranks: int, *, sidecar: bool) -> None:
    config = CoordinatorConfig(bind=[_coordinator(folder)], http=None, log_level=LogLevel.ERROR)
    path = write_config(folder, "coordinator", config)
    services = [await children.start("coordinator", [*KVCOORD, "coordinator", "--config", path, *SERVE])]
    star = ["-m", "kvcoord.load.bench.star", str(folder / "star"), str(ranks)]
    hub = await children.start("star", star)
    for rank in range(ranks if sidecar else 0):
        worker = WorkerConfig(
            group=group_config("bench-sidecar", ranks, 1),
            rank=rank,
            listen=_worker(folder, rank),
            coordinators=[_coordinator(folder)],
            device_pages=PAGES,
            host_pages=PAGES,
            http=None,
            log_level=LogLevel.ERROR,
        )
        path = write_config(folder, f"rank{rank}", worker)
        services.append(await children.start(f"worker of rank {rank}", [*KVCOORD, "worker", "--config", path, *SERVE]))
    for service in services:
        await service.ready()
    await hub.hear()


def write_config(folder: Path, name: str, config: msgspec.Struct) -> str:
    """A configuration as a file, and its path. JSON is YAML."""
    path = folder / f"{name}.yaml"
    path.write_bytes(msgspec.json.encode(config))
    return str(path)


def _coordinator(folder: Path) -> str:
    return f"unix://{folder}/coordinator.sock"


def _worker(folder: Path, rank: int) -> str:
    return f"ipc://{folder}/rank{rank}.sock"
