"""The peer that a replay is compared with: ranks that agree by a blocking all_reduce(MIN), as engines do today.

`GlooConsensus` is one more way for the cache logic to learn what all ranks can do: every decision is a collective on
the thread that serves the engine, and copies end in order of submission, as many as are over on all ranks. The rest of
the worker is the same. Run as `python -m kvcoord.load.gloo CONFIG STORE`, one process for each rank; the ranks find
each other through the file STORE. Needs torch, which no other part of a replay does.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from kvcoord.config import WorkerConfig, load
from kvcoord.controller.assembly import make_machine
from kvcoord.controller.operations import Operation
from kvcoord.controller.tiers import TierPools
from kvcoord.controller.worker import WorkerMachine
from kvcoord.domain import Agreement, OperationId, Outcome, Rank, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.protocol.messages import Ack, Completion, Decision, Vote
from kvcoord.runtime.process import run
from kvcoord.runtime.worker import serve

NONE: Final = 1 << 40
"""Larger than any rank, reason or position: what a rank says that has none."""

REASONS: Final = tuple(Reason)

STANDARD_OUTPUT: Final = 1


class GlooConsensus:
    """One rank of a process group. All ranks make the same calls in the same order, or all of them hang.

    `operations` are those of the cache logic, in the order in which all ranks have started them.
    """

    def __init__(self, pools: TierPools, rank: Rank) -> None:
        self.operations: Mapping[OperationId, Operation] = {}
        self._pools = pools
        self._rank = rank
        self._free: dict[Tier, int] = {}
        """What the last collective of this decision has said, and what agreed evictions have added since."""
        self._acks: dict[OperationId, Ack] = {}

    def available(self, tier: Tier) -> int:
        free = self._free.get(tier)
        if free is None:
            (free,) = _minimum([self._pools.free(tier)])
            self._free[tier] = free
        return free

    def issue(self, tier: Tier, pages: int) -> None:
        """The pools say what is left; the next decision asks again."""
        self._free.pop(tier, None)

    def credit(self, tier: Tier, pages: int) -> None:
        if tier in self._free:
            self._free[tier] += pages

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        if vote.agreement is not Agreement.ALL:
            raise UsageError("agreement", vote.agreement.value, "only ALL is played with a collective")
        names = [pool.name for pool in (*self._pools.device, *self._pools.host)]
        shortfalls = [-vote.shortfall.get(name, 0) for name in names]
        no = [1, NONE, NONE] if vote.yes else [0, self._rank, REASONS.index(vote.reason or Reason.REFUSED)]
        yes, rank, reason, *missing = _minimum([*no, *shortfalls])
        if yes:
            return Decision(vote.operation, Outcome.COMMIT)
        shortfall = {name: -count for name, count in zip(names, missing, strict=True) if count}
        return Decision(vote.operation, Outcome.ABORT, 0, None, REASONS[reason], rank, shortfall)

    def ack(self, ack: Ack) -> None:
        self._acks[ack.operation] = ack

    def ended(self) -> list[Completion]:
        """The leading operations whose copies are over on all ranks, up to the first that failed on any."""
        self._free.clear()
        if not self.operations:
            return []
        leading, failed = self._leading()
        count, position, rank = _minimum([leading, failed, self._rank if failed < NONE else NONE])
        ended: list[Completion] = []
        for at, operation in enumerate([*self.operations][: min(count, position + 1)]):
            del self._acks[operation]
            if at < position:
                ended.append(Completion(operation, True))
            else:
                ended.append(Completion(operation, False, reason=Reason.COPY_FAILED, rank=rank))
        return ended

    def _leading(self) -> tuple[int, int]:
        """How many of the oldest operations are over here, up to the first that failed; its position, or NONE."""
        over = 0
        for operation in self.operations:
            ack = self._acks.get(operation)
            if ack is None:
                break
            over += 1
            if not ack.ok:
                return over, over - 1
        return over, NONE


def make_gloo_machine(config: WorkerConfig, incarnation: int) -> WorkerMachine:
    """A rank's machine without a coordinator. The process group is there already."""
    made: list[GlooConsensus] = []

    def consensus(pools: TierPools) -> GlooConsensus:
        made.append(GlooConsensus(pools, config.rank))
        return made[-1]

    machine = make_machine(config, None, consensus)
    made[-1].operations = machine.cache.state.operations
    return machine


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


def main(config_file: str, store: str) -> int:
    """Serves one rank until it is asked to stop. Returns the exit code."""
    config = load(WorkerConfig, file=Path(config_file), environment={}, flags={}).config
    join_process_group(config, Path(store))
    try:
        return run(
            lambda stop: serve(config, stop, make_gloo_machine),
            shutdown_timeout_s=config.timeouts.shutdown_timeout_s,
            ready_fd=STANDARD_OUTPUT,
            exit_with_parent=True,
        )
    finally:
        dist.destroy_process_group()


def _minimum(numbers: Iterable[int]) -> list[int]:
    """The smallest of each over all ranks: one blocking collective."""
    shared = torch.tensor(list(numbers), dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    agreed: list[int] = shared.tolist()
    return agreed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
