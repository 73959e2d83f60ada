"""How the cache logic learns what all ranks can do. The logic itself does not know which of these it runs with.

`AgreedConsensus` is kvcoord: ledger and votes. `LocalConsensus` decides alone, for demonstrations of what then happens.
A blocking collective (`load.gloo`) is a third, for comparison.
"""

from collections.abc import Sequence
from typing import Protocol

from kvcoord.controller.tiers import TierPools
from kvcoord.domain import Outcome, Tier
from kvcoord.protocol.ballot import participants_of
from kvcoord.protocol.effects import RankEffect
from kvcoord.protocol.ledger import Ledger
from kvcoord.protocol.messages import Ack, Completion, Decision, Vote
from kvcoord.protocol.rank import RankMachine


class Consensus(Protocol):
    """What the cache logic asks of the group. Tails: slots in each pool that keeps only the end of a sequence."""

    def available(self, tier: Tier) -> int:
        """Pages that an operation issued now may take on every rank."""
        ...

    def available_tails(self, tier: Tier) -> list[int]:
        """Tails that it may take."""
        ...

    def issue(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        """An operation takes pages and tails, covered or put to the vote."""
        ...

    def credit(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        """An agreed eviction gave pages and tails back on every rank."""
        ...

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        """Puts an operation to the vote. None: the decision comes later."""
        ...

    def ack(self, ack: Ack) -> None:
        """This rank's copy is over."""
        ...

    def ended(self) -> list[Completion]:
        """Asked once a step: operations that have ended, where no verdict says so."""
        ...


class AgreedConsensus:
    """The group decides: capacity from the ledger, votes and acks through the rank's machine.

    `now` is set before each event; what is to be sent collects in `effects`. Of the `pool_count` pools of a tier the
    first `page_pools` hold every page.
    """

    def __init__(self, ledger: Ledger, rank: RankMachine, pool_count: int, page_pools: int) -> None:
        self.ledger = ledger
        self.now = 0.0
        self.effects: list[RankEffect] = []
        self._rank = rank
        self._pools = pool_count
        self._page_pools = page_pools

    def available(self, tier: Tier) -> int:
        first = self._first(tier)
        if self._page_pools == 1:
            return self.ledger.available(first)
        return min(self.ledger.available(first + number) for number in range(self._page_pools))

    def available_tails(self, tier: Tier) -> list[int]:
        first = self._first(tier)
        return [self.ledger.available(number) for number in range(first + self._page_pools, first + self._pools)]

    def issue(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        first = self._first(tier)
        for number in range(first, first + self._page_pools):
            self.ledger.issue(number, pages)
        for number, count in enumerate(tails, first + self._page_pools):
            self.ledger.issue(number, count)

    def agree(self, tier: Tier, free: Sequence[int]) -> None:
        """So many slots are free in each pool of the tier, on every rank."""
        for number, count in enumerate(free, self._first(tier)):
            self.ledger.agree(number, count)

    def credit(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        first = self._first(tier)
        for number in range(first, first + self._page_pools):
            self.ledger.credit(number, pages)
        for number, count in enumerate(tails, first + self._page_pools):
            self.ledger.credit(number, count)

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        """While the group is suspended, a participant without lockstep is answered at once: without it nothing commits.

        In lockstep the answer would not be enough: what follows from an abort depends on its reason and shortfall, and
        those are the group's to say. The vote is kept, and the next epoch decides it.
        """
        if deferred:
            self._rank.defer(vote)
            return None
        if not self._rank.active and not self._rank.lockstep and self._takes_part(vote):
            reason, rank = self._rank.suspended_reason, self._rank.suspended_rank
            return Decision(vote.operation, Outcome.ABORT, 0, None, reason, rank)
        self.effects += self._rank.vote(vote, self.now)
        return self._rank.decided(vote.operation)

    def ack(self, ack: Ack) -> None:
        self.effects += self._rank.ack(ack, self.now)

    def ended(self) -> list[Completion]:
        return []

    def _takes_part(self, vote: Vote) -> bool:
        who = self._rank.identity
        return bool(participants_of(vote.participants, (1 << who.world_size) - 1) >> who.rank & 1)

    def _first(self, tier: Tier) -> int:
        return 0 if tier is Tier.DEVICE else self._pools


class LocalConsensus:
    """This rank's own view, and its own decisions: what a group without agreement does. Never for production."""

    def __init__(self, pools: TierPools) -> None:
        self._pools = pools
        self._acks: list[Ack] = []

    def available(self, tier: Tier) -> int:
        return self._pools.free(tier)

    def available_tails(self, tier: Tier) -> list[int]:
        return self._pools.free_tails(tier)

    def issue(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        """The pools themselves say what is left."""

    def credit(self, tier: Tier, pages: int, tails: Sequence[int] = ()) -> None:
        """The pools themselves say what is left."""

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        outcome = Outcome.COMMIT if vote.yes else Outcome.ABORT
        return Decision(vote.operation, outcome, 0, vote.value, vote.reason, -1, vote.shortfall)

    def ack(self, ack: Ack) -> None:
        self._acks.append(ack)

    def ended(self) -> list[Completion]:
        acks, self._acks = self._acks, []
        return [Completion(ack.operation, ack.ok, reason=ack.reason) for ack in acks]
