"""The worker process of a replay with `--agreement gloo`: one rank of a torch process group over loopback.

Run as `python -m kvcoord.load.gloo CONFIG STORE`, one process for each rank; the ranks find each other through the file
STORE. The only part of a replay that needs torch.
"""

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from kvcoord.config import WorkerConfig, load
from kvcoord.load.collective import make_collective_machine
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.garbage import survivors_set_aside
from kvcoord.runtime.process import Stop, run
from kvcoord.runtime.worker import Worker
from kvcoord.transport.unix import UnixTransport

STANDARD_OUTPUT: Final = 1


def main(config_file: str, store: str) -> int:
    """Serves one rank until it is asked to stop. Returns the exit code."""
    config = load(WorkerConfig, file=Path(config_file)).config
    join_process_group(config, Path(store))
    try:
        with survivors_set_aside():  # As in kvcoord's own workers.
            return run(
                lambda stop: serve(config, stop),
                shutdown_timeout_s=config.timeouts.shutdown_timeout_s,
                ready_fd=STANDARD_OUTPUT,
                exit_with_parent=True,
            )
    finally:
        dist.destroy_process_group()


async def serve(config: WorkerConfig, stop: Stop) -> int:
    """The worker of one rank that agrees by a collective, without a coordinator, until `stop`."""
    recorder = FlightRecorder(f"rank{config.rank}", config.limits.recorder_events_max)
    worker = Worker(config, UnixTransport(), None, recorder, lambda _, __: make_collective_machine(config, minimum))
    await worker.open()
    try:
        stop.ready([worker.address])
        asked: asyncio.Future[None] = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[None] | asyncio.Future[Exception]] = [asked, worker.ended]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if worker.ended.done():
            raise worker.ended.result()
    finally:
        await worker.close()
    return 0


def join_process_group(config: WorkerConfig, store: Path) -> None:
    """Returns when all ranks are there."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    world_size = config.group.world_size
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=config.rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeouts.group_deadline_s),
    )


def minimum(numbers: list[int]) -> list[int]:
    """The smallest of each over all ranks: one blocking all_reduce(MIN)."""
    shared = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    agreed: list[int] = shared.tolist()
    return agreed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
