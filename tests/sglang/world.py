"""Runs one scenario on several real processes, joined by real process groups, and collects what each says.

The processes are forked from the test's own, which has imported SGLang already: that takes seconds.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final, cast

import torch

from tests.sglang.engine import Groups

HANGS: Final = "hangs"

PATIENCE: Final = {
    "KVCOORD_TIMEOUTS__HEARTBEAT_TIMEOUT_S": "60",
    "KVCOORD_TIMEOUTS__PREPARE_TIMEOUT_S": "60",
    "KVCOORD_TIMEOUTS__VOTE_TIMEOUT_S": "60",
}
"""For scenarios without a configuration of their own: nobody is lost because the machine has not let it run."""
_FORK: Final = multiprocessing.get_context("fork")


@dataclass
class Result:
    """What became of one rank: a value, an error, or neither in time."""

    value: Any = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


Scenario = Callable[[Groups], Any]


def run_ranks(
    scenario: Scenario,
    *,
    tp: int = 2,
    pp: int = 1,
    limit_s: float = 150.0,
    environment: dict[str, str] | None = None,
    silent: int | None = None,
) -> list[Result]:
    """Runs `scenario` on tp x pp ranks. A rank that has not ended after `limit_s` is killed and `hangs`.

    `silent` is a rank that will say nothing: it is not waited for.
    """
    world = tp * pp
    with tempfile.TemporaryDirectory(prefix="kvcoord-test-") as folder:
        settings = {"XDG_RUNTIME_DIR": folder, **(environment or {})}
        if "KVCOORD_CONFIG" not in settings:
            settings |= PATIENCE
        pipes = []
        processes = []
        for rank in range(world):
            ours, theirs = _FORK.Pipe(duplex=False)
            arguments = (scenario, Groups(rank, tp, pp), world, f"{folder}/store", settings, theirs)
            process = _FORK.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = _collect(pipes, limit_s, silent)
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _collect(pipes: list[Connection], limit_s: float, silent: int | None) -> list[Result]:
    results = [Result(error=HANGS) for _ in pipes]
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes) if rank != silent}
    give_up_at = time.monotonic() + limit_s
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, give_up_at - time.monotonic()))
        if not ready:
            break
        for pipe in cast(list[Any], ready):
            rank = open_pipes.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = Result(error="the process ended without a word")
    return results


def _rank(
    scenario: Scenario, groups: Groups, world: int, store: str, settings: dict[str, str], pipe: Connection
) -> None:
    os.environ.update(settings)
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, world), rank=groups.rank, world_size=world
        )
        groups.open()
        result = Result(scenario(groups))
    except BaseException as error:
        result = Result(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send(result)
    pipe.close()
    # A collective that a peer has left would keep the usual end of a process waiting.
    os._exit(0)


def values(results: list[Result]) -> list[Any]:
    """What the ranks came to. Fails, with what it said, for a rank that did not."""
    for rank, result in enumerate(results):
        assert result.ok, f"rank {rank}: {result.error}"
    return [result.value for result in results]


def agree(results: list[Result]) -> bool:
    """Did all ranks end, and come to the same?"""
    return all(result.ok and result.value == results[0].value for result in results)
