"""Agreement by a blocking collective, as engines do without kvcoord: the peer that a replay is compared with.

`CollectiveConsensus` is one more way for the cache logic to learn what all ranks can do: every decision is one
all_reduce(MIN) on the thread that serves the engine, and copies end in the order in which they were started, as many
as are over on all ranks. The rest of the worker is the same. Which library reduces is not known here: see `gloo`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvcoord.config import WorkerConfig
from kvcoord.controller.assembly import make_machine
from kvcoord.controller.operations import Operation
from kvcoord.controller.tiers import TierPools
from kvcoord.controller.worker import WorkerMachine
from kvcoord.domain import Agreement, OperationId, Outcome, Rank, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.protocol.messages import Ack, Completion, Decision, Vote

NONE: Final = 1 << 40
"""Larger than any rank, reason or position: what a rank says that has none."""

REASONS: Final = tuple(Reason)

Minimum = Callable[[list[int]], list[int]]
"""Blocks until all ranks have called it with as many numbers; returns the smallest over the ranks of each."""


class CollectiveConsensus:
    """One rank. All ranks make the same calls in the same order, or all of them hang: that is what is compared with.

    `operations` are those of the cache logic, in the order in which all ranks have started them.
    """

    def __init__(self, pools: TierPools, rank: Rank, minimum: Minimum) -> None:
        self.operations: Mapping[OperationId, Operation] = {}
        self._pools = pools
        self._pool_names = [pool.name for pool in (*pools.device, *pools.host)]
        self._rank = rank
        self._minimum = minimum
        self._free: dict[Tier, list[int]] = {}
        """What the collective of this decision has said (pages, then tails), and what agreed evictions have added."""
        self._acks: dict[OperationId, Ack] = {}

    def available(self, tier: Tier) -> int:
        return self._agreed(tier)[0]

    def available_tails(self, tier: Tier) -> list[int]:
        return self._agreed(tier)[1:]

    def _agreed(self, tier: Tier) -> list[int]:
        free = self._free.get(tier)
        if free is None:
            free = self._free[tier] = self._minimum([self._pools.free(tier), *self._pools.free_tails(tier)])
        return free

    def issue(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        """The pools say what is left: the next decision asks again."""
        self._free.pop(tier, None)

    def credit(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        free = self._free.get(tier)
        if free is not None:
            self._free[tier] = [one + more for one, more in zip(free, (pages, *tails), strict=True)]

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        """Decides at once: COMMIT, or ABORT with the first rank that said no and the largest shortfall."""
        if vote.agreement is not Agreement.ALL:
            raise UsageError("agreement", vote.agreement.value, "only ALL is played with a collective")
        no = [1, NONE, NONE] if vote.yes else [0, self._rank, REASONS.index(vote.reason or Reason.REFUSED)]
        missing = [-vote.shortfall.get(name, 0) for name in self._pool_names]
        yes, rank, reason, *missing = self._minimum([*no, *missing])
        if yes:
            return Decision(vote.operation, Outcome.COMMIT)
        shortfall = {name: -count for name, count in zip(self._pool_names, missing, strict=True) if count}
        return Decision(vote.operation, Outcome.ABORT, 0, None, REASONS[reason], rank, shortfall)

    def ack(self, ack: Ack) -> None:
        self._acks[ack.operation] = ack

    def ended(self) -> list[Completion]:
        """The oldest operations, as many as are over on all ranks, up to the first that failed on any."""
        self._free.clear()
        if not self.operations:
            return []
        over, failed = self._over()
        count, failed, rank = self._minimum([over, failed, self._rank if failed < NONE else NONE])
        ended: list[Completion] = []
        for position, operation in enumerate([*self.operations][: min(count, failed + 1)]):
            del self._acks[operation]
            if position < failed:
                ended.append(Completion(operation, True))
            else:
                ended.append(Completion(operation, False, reason=Reason.COPY_FAILED, rank=rank))
        return ended

    def _over(self) -> tuple[int, int]:
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


def make_collective_machine(config: WorkerConfig, minimum: Minimum) -> WorkerMachine:
    """A rank's machine without a coordinator."""
    made: list[CollectiveConsensus] = []

    def consensus(pools: TierPools) -> CollectiveConsensus:
        made.append(CollectiveConsensus(pools, config.rank, minimum))
        return made[-1]

    machine = make_machine(config, None, consensus)
    made[-1].operations = machine.cache.state.operations
    return machine
