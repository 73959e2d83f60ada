"""The worker process of a replay with `--agreement gloo`: one rank of a torch process group over loopback.

Run as `python -m kvcoord.load.gloo CONFIG STORE`, one process for each rank; the ranks find each other through the file
STORE. The only part of a replay that needs torch.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from kvcoord.config import WorkerConfig, load
from kvcoord.load.collective import make_collective_machine
from kvcoord.runtime.process import run
from kvcoord.runtime.worker import serve

STANDARD_OUTPUT: Final = 1


def main(config_file: str, store: str) -> int:
    """Serves one rank until it is asked to stop. Returns the exit code."""
    config = load(WorkerConfig, file=Path(config_file)).config
    join_process_group(config, Path(store))
    try:
        return run(
            lambda stop: serve(config, stop, lambda config, _: make_collective_machine(config, minimum)),
            shutdown_timeout_s=config.timeouts.shutdown_timeout_s,
            ready_fd=STANDARD_OUTPUT,
            exit_with_parent=True,
        )
    finally:
        dist.destroy_process_group()


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
