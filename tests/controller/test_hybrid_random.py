"""Conservation in every pool of a hybrid group, over many operations of the real cache logic under random failures."""

import random
from collections import Counter

import pytest

from kvcoord.controller.cache import Cache
from kvcoord.controller.consensus import LocalConsensus
from kvcoord.controller.effects import Reply, StartCopy
from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX, TailPool, TierPools
from kvcoord.domain import OperationId, Outcome, Reason, Tier, WritePolicy
from kvcoord.index.eviction import LruOrder
from kvcoord.index.keys import block_page_keys
from kvcoord.index.tree import RadixTree
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.local import Acquired, Allocated
from kvcoord.protocol.messages import Completion, Decision, Vote
from tests.controller.hybrid import WINDOW, check_conservation

OPERATIONS = 100_000
SEEDS = 4
OPERATIONS_BETWEEN_CHECKS = 250

PROMPTS = [block_page_keys([prompt % 3, *range(100 * prompt, 100 * prompt + prompt % 7)]) for prompt in range(1, 25)]


class MoodyGroup(LocalConsensus):
    """Other ranks that have room or not, vote no, and fail to copy, by chance."""

    def __init__(self, pools: TierPools, rng: random.Random) -> None:
        super().__init__(pools)
        self._random = rng
        self._names = [pool.name for pool in (*pools.device, *pools.host)]

    def available(self, tier: Tier) -> int:
        return max(0, super().available(tier) - self._random.choice((0, 0, 0, 2)))

    def available_tails(self, tier: Tier) -> list[int]:
        return [max(0, free - self._random.choice((0, 0, 0, 1))) for free in super().available_tails(tier)]

    def propose(self, vote: Vote, *, deferred: bool) -> Decision | None:
        if vote.yes and self._random.random() < 0.2:
            reason = Reason.DEVICE_FULL if "load" in vote.kind or "alloc" in vote.kind else Reason.HOST_FULL
            short = {self._random.choice(self._names): self._random.randint(1, 3)}
            return Decision(vote.operation, Outcome.ABORT, 0, None, reason, 1, short)
        return super().propose(vote, deferred=deferred)


class Rank:
    """One rank's cache, whose copies end when `act` says so, and whose engine does whatever comes to its mind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        tails = [TailPool("window", WINDOW, 14, 16), TailPool("state", 1, 6, 7)]
        pools = TierPools(["kv", "index"], 30, 36, tails)
        self.state = CacheState(
            rank=0,
            tree=RadixTree(LruOrder(), ["kv", "index"], ["kv", "index"], pools.windows),
            pools=pools,
            consensus=MoodyGroup(pools, self.random),
            digest=Digest(16),
            policy=WritePolicy.WRITE_THROUGH,
            write_hits_min=2,
            lockstep=True,
            immediate_allowed=True,
            operations_max=24,
        )
        self.cache = Cache(self.state)
        self.seen: Counter[str] = Counter()
        self.copies: list[OperationId] = []
        self.ended: list[tuple[OperationId, bool]] = []
        self.draining: list[OperationId] = []
        self.leases: list[int] = []
        self.slots: list[list[list[int]]] = []

    def act(self) -> None:
        """One operation, or the next step of one."""
        what = self.random.choice(
            ("acquire", "acquire", "hand_in", "hand_in", "copy", "copy", "complete", "complete", "allocate", "evict")
        )
        getattr(self, what)()
        self.seen[what] += 1
        self.follow()

    def acquire(self) -> None:
        path = self.random.choice(PROMPTS)
        self.cache.acquire(path[: self.random.randint(1, len(path))], (1, 1), landed=False)

    def hand_in(self) -> None:
        """The oldest lease: written or not, its slots go back, or to the index."""
        if self.leases:
            number = self.leases.pop(0)
            if self.random.random() < 0.8:
                self.cache.write_lease(number, (1, 1), deferred=True)
            self.cache.release(number, (1, 1))

    def copy(self) -> None:
        if self.copies:
            operation = self.copies.pop(self.random.randrange(len(self.copies)))
            error = Reason.COPY_FAILED if self.random.random() < 0.1 else None
            self.cache.copy_ended(operation, error)
            self.ended.append((operation, error is None and self.random.random() < 0.9))

    def complete(self) -> None:
        """The group's word. A retraction comes twice: at once, and when no rank copies any more."""
        if self.draining:
            self.cache.complete(Completion(self.draining.pop(), False, reason=Reason.COPY_FAILED, rank=1))
        elif self.ended:
            operation, ok = self.ended.pop(0)
            drained = ok or self.random.random() < 0.5
            self.cache.complete(
                Completion(operation, ok, reason=None if ok else Reason.COPY_FAILED, rank=1, drained=drained)
            )
            self.seen["retracted"] += not ok
            if not drained:
                self.draining.append(operation)

    def allocate(self) -> None:
        """Slots of the engine's own, which are used or given back later."""
        if not self.slots or self.random.random() < 0.5:
            self.cache.allocate(self.random.randint(1, 5), (1, 1))
            return
        slots = self.slots.pop()
        path = self.random.choice(PROMPTS)
        if len(slots[0]) <= len(path) and self.random.random() < 0.7:
            self.cache.write_slots(path[: self.random.randint(len(slots[0]), len(path))], slots, (1, 1), deferred=True)
        else:
            self.cache.free(slots, (1, 1))

    def evict(self) -> None:
        self.cache.evict(self.random.choice(list(Tier)), self.random.randint(0, 3), (1, 1))

    def follow(self) -> None:
        """Takes what the cache says."""
        effects, self.state.effects = self.state.effects, []
        for effect in effects:
            if isinstance(effect, StartCopy):
                self.copies.append(effect.operation)
                assert len(effect.source_slots) == len(effect.destination_slots) == len(self.state.pools.names)
                self.seen["copy of ends alone"] += not effect.source_slots[0]
            elif isinstance(effect, Reply) and isinstance(effect.answer, Acquired):
                self.count(effect.answer)
            elif isinstance(effect, Reply) and isinstance(effect.answer, Allocated) and effect.answer.outcome:
                self.slots.append(effect.answer.slots)

    def count(self, answer: Acquired) -> None:
        self.seen["granted" if answer.outcome else "refused"] += 1
        self.seen["hit"] += answer.device_pages + answer.host_pages > 0
        if answer.outcome:
            self.leases.append(answer.lease)

    def come_to_rest(self) -> None:
        while self.leases or self.copies or self.ended or self.draining or self.slots:
            self.hand_in()
            self.copy()
            self.complete()
            if self.slots:
                self.cache.free(self.slots.pop(), (1, 1))
            self.follow()

    def check(self) -> None:
        check_conservation(self.state)
        operations = set(self.state.operations)
        leases = {lease.owner for lease in self.state.leases.values()}
        read_still = {op.id for ops in self.cache.loads._outside.values() for op in ops}
        for pool in (*self.state.pools.device, *self.state.pools.host):
            owners = {pool.owner(slot) for slot in range(pool.capacity)} - {None, INDEX, "engine"}
            assert owners <= operations | leases | read_still, f"{pool.name}: slots of what has ended"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_after_100_000_operations_under_random_failures_every_pool_has_all_of_its_slots(seed: int) -> None:
    rank = Rank(seed)
    for number in range(OPERATIONS // SEEDS):
        rank.act()
        if number % OPERATIONS_BETWEEN_CHECKS == 0:
            rank.check()
    rank.come_to_rest()
    rank.check()
    for pool in (*rank.state.pools.device, *rank.state.pools.host):
        assert {pool.owner(slot) for slot in range(pool.capacity)} <= {None, INDEX}
    for tier in Tier:
        assert rank.state.tree.evictable(tier) == rank.state.tree.pages(tier)
        for book in rank.state.tree.tails.on(tier):
            assert book.evictable == len(book.pages)
    often = ("granted", "refused", "hit", "retracted", "copy of ends alone")
    assert min(rank.seen[what] for what in often) > OPERATIONS // SEEDS // 1000, rank.seen
