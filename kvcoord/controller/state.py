"""What the parts of one rank's cache logic share: index, pools, open operations, digest, counters, pending effects."""

from collections.abc import Sequence

import msgspec

from kvcoord.controller.consensus import Consensus
from kvcoord.controller.effects import CacheEffect, Reply
from kvcoord.controller.leases import Lease
from kvcoord.controller.operations import Call, Operation
from kvcoord.controller.tiers import TierPools
from kvcoord.domain import (
    Aborted,
    Committed,
    OperationId,
    OperationKind,
    Outcome,
    PageKey,
    Path,
    Rank,
    Reason,
    Tier,
    WritePolicy,
)
from kvcoord.index.tree import RadixTree
from kvcoord.memory.shares import Shares
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.local import Answer, Loaded
from kvcoord.protocol.messages import Decision

InFlight = dict[PageKey, tuple[Operation, int]]

DecisionKey = tuple[OperationKind | None, Path, Outcome, Reason | None]


class Counters:
    """Plain numbers, read when somebody asks."""

    __slots__ = ("decisions", "pages_copied", "pages_evicted", "pages_hit", "pages_requested", "retractions")

    def __init__(self) -> None:
        self.decisions: dict[DecisionKey, int] = {}
        self.retractions: dict[Reason, int] = {}
        self.pages_hit = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.pages_evicted = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.pages_copied = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.pages_requested = 0


class CacheState:
    """One rank's cache. `tick` is the logical clock: recency is the number of the call or entry that used a page."""

    def __init__(
        self,
        *,
        rank: Rank,
        tree: RadixTree,
        pools: TierPools,
        consensus: Consensus,
        digest: Digest,
        policy: WritePolicy,
        write_hits_min: int,
        lockstep: bool,
        immediate_allowed: bool,
        operations_max: int,
        shares: Shares | None = None,
    ) -> None:
        self.rank = rank
        self.tree = tree
        self.pools = pools
        self.consensus = consensus
        self.digest = digest
        self.policy = policy
        self.hits_min = write_hits_min if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 0
        self.lockstep = lockstep
        """Whether the engine's steps are rounds. Without, its device slots are its own and no device page is known."""
        self.immediate_allowed = immediate_allowed
        """Whether a step may wait for a vote: not across pipeline stages, where it would be a circular wait."""
        self.shares = shares
        """Where host pages are kept once by ranks that hold the same bytes. None: each rank keeps its own."""
        self._operations_max = operations_max
        self.tick = 0
        self.serial = 0
        self.operations: dict[OperationId, Operation] = {}
        self.in_flight: dict[Tier, InFlight] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """By destination: pages being copied there, with their position among the operation's pages."""
        self.tails_in_flight: dict[Tier, tuple[InFlight, ...]] = {
            tier: tuple([{} for _ in pools.windows]) for tier in Tier
        }
        """The same for each pool that keeps only ends."""
        self.leases: dict[int, Lease] = {}
        self.waiting_for: OperationId | None = None
        """The operation whose outcome the engine's next call has to wait for: it was put to an immediate vote, or its
        slots are agreed but still being copied from. Calls keep their order, so that all ranks go through the same."""
        self.effects: list[CacheEffect] = []
        self.outcomes: list[Committed | Aborted] = []
        self.broken: list[int] = []
        """Leases whose load-back was retracted since the last step."""
        self.counters = Counters()

    def next_serial(self) -> int:
        """A number for the next operation: the same on every rank, since all issue the same operations in order."""
        self.serial += 1
        return self.serial

    def at_limit(self) -> bool:
        """Whether so much is open that the next operation has to be aborted: the same on every rank in lockstep."""
        return len(self.operations) >= self._operations_max or len(self.leases) >= self._operations_max

    def leaving(self) -> bool:
        """Whether copies run out of device slots that were given up: those slots will be free without more ado."""
        return any(op.leaving and op.copy_open for op in self.operations.values())

    def unpin(self, holder: Operation | Lease) -> None:
        """Lets go of everything that an operation or a lease keeps in its place."""
        for pin in holder.pins:
            self.tree.unpin(pin)
        for tail_pin in holder.tail_pins:
            self.tree.tails.unpin(tail_pin)
        holder.pins.clear()
        holder.tail_pins.clear()

    def reply(self, call: Call, answer: Answer) -> None:
        self.effects.append(Reply(call[0], call[1], answer))

    def count(self, kind: OperationKind, path: Path, decision: Decision) -> None:
        reason = decision.reason if decision.outcome is Outcome.ABORT else None
        key = (kind, path, decision.outcome, reason)
        self.counters.decisions[key] = self.counters.decisions.get(key, 0) + 1


def outcome_of(decision: Decision, path: Path) -> Committed | Aborted:
    """A decision as the engine sees it."""
    if decision.outcome is Outcome.COMMIT:
        return Committed(decision.operation, path, decision.value)
    return Aborted(decision.operation, path, decision.reason or Reason.REFUSED, decision.rank, decision.shortfall)


def with_error(answer: Loaded, op: Operation) -> Loaded:
    """The answer to a load-back that was waited for: whether this rank's copy failed."""
    return answer if op.copy_error is None else msgspec.structs.replace(answer, error=str(op.copy_error))


def joined(slots: Sequence[Sequence[list[int]]]) -> tuple[list[int], ...]:
    """Slots of several runs as one list per pool."""
    if len(slots) == 1:
        return tuple(slots[0])
    return tuple([[slot for run in pool for slot in run] for pool in zip(*slots, strict=True)])
