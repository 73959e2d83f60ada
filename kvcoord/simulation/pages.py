"""Promises about pages: Conservation, Quiescence, Visibility."""

from typing import Final

import msgspec

from kvcoord.controller.operations import Operation
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import OperationId, PageKey, Tier
from kvcoord.errors import InvariantBroken
from kvcoord.memory.shares import Shares
from kvcoord.memory.slots import SlotState
from kvcoord.protocol.ballot import participants_of
from kvcoord.protocol.messages import Ack, Frame, StreamAck
from kvcoord.simulation.memory import TORN, OpenCopy
from kvcoord.simulation.program import PROMPTS
from kvcoord.simulation.promise import Observed, Promise
from kvcoord.simulation.rank import SimulatedRank

_EVENTS_BETWEEN_AUDITS: Final = 64


class Conservation(Promise):
    """For each pool free + reserved + in use + quarantined = capacity; no page has two owners."""

    name = "conservation"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self._events = 0

    def after_rank(self, rank: SimulatedRank) -> None:
        try:
            for pool in rank.pools:
                if pool.changed:
                    pool.changed = False
                    pool.check()
            self._events += 1
            if self._events % _EVENTS_BETWEEN_AUDITS == 0:
                self._audit(rank)
        except InvariantBroken as error:
            raise self.broken(f"{rank.name}: {error}") from error

    def finish(self) -> None:
        """Nothing is held but what is published."""
        for rank in self.world.ranks:
            self._audit(rank)
            for pool in rank.pools:
                pool.check()
                if pool.reserved_count or pool.quarantined_count:
                    raise self.broken(f"{rank.name}: {pool.statistics()} after everything has ended")
                leaked = [slot for slot in range(pool.capacity) if pool.owner(slot) not in (None, INDEX)]
                if leaked:
                    owners = sorted({str(pool.owner(slot)) for slot in leaked})
                    raise self.broken(f"{rank.name}: {pool.name} slots {leaked} leaked by {owners}", owners[0])
            state = rank.worker.cache.state
            for tier in (Tier.DEVICE, Tier.HOST):
                if state.tree.evictable(tier) != state.tree.pages(tier):
                    raise self.broken(f"{rank.name}: pins are left on {tier} pages")
                if [book.evictable for book in state.tree.tails.on(tier)] != state.tree.tails.counts(tier):
                    raise self.broken(f"{rank.name}: pins are left on the ends of prefixes on {tier}")

    def _audit(self, rank: SimulatedRank) -> None:
        state = rank.worker.cache.state
        state.tree.check()
        for tier in (Tier.DEVICE, Tier.HOST):
            pages = [state.tree.pages(tier)] * state.pools.page_pools + state.tree.tails.counts(tier)
            for pool, published in zip(state.pools.of(tier), pages, strict=True):
                owned = [slot for slot in range(pool.capacity) if pool.owner(slot) == INDEX]
                if len(owned) != published or any(pool.state(slot) is not SlotState.USED for slot in owned):
                    raise self.broken(
                        f"{rank.name}: the index owns {len(owned)} slots of {pool.name} for {published} pages"
                    )


class Quiescence(Promise):
    """No page is freed, reused or evicted while a copy touches it. The pools say the first two themselves."""

    name = "quiescence"

    def copy_ending(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        same_engine = copy.engine_life == rank.memory.engine_life
        if copy.source is Tier.HOST or same_engine:
            self._check_source(rank, copy)
        if copy.destination is Tier.HOST or same_engine:
            self._check_destination(rank, copy)

    def _check_source(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        if rank.memory.read(copy.source, copy.source_slots) != copy.contents:
            raise self.broken(f"{rank.name}: {copy.operation} read pages that changed meanwhile", copy.operation)

    def _check_destination(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        written = rank.memory.read(copy.destination, copy.destination_slots)
        if any(symbol != TORN for pool in written for symbol in pool):
            raise self.broken(f"{rank.name}: somebody else wrote where {copy.operation} writes", copy.operation)

    def read(self, rank: SimulatedRank, what: object, wrong: str) -> None:
        if wrong and isinstance(what, int):
            raise self.broken(f"{rank.name}: under lease {what} {wrong}")


class Visibility(Promise):
    """A lookup sees a page only after every participant's copy landed, and sees the right bytes."""

    name = "visibility"

    def __init__(self, world: Observed) -> None:
        super().__init__(world)
        self._landed: dict[tuple[int, OperationId], int] = {}
        self._participants: dict[tuple[int, OperationId], int] = {}
        self._everyone = (1 << self.world.shape.ranks) - 1
        self._events = 0

    def sent(self, rank: SimulatedRank, message: msgspec.Struct) -> None:
        if isinstance(message, StreamAck):
            self._acked(rank, message.ack)
        elif isinstance(message, Frame):
            for ack in message.acks:
                self._acked(rank, ack)

    def _acked(self, rank: SimulatedRank, ack: Ack) -> None:
        if ack.operation in rank.copies:
            raise self.broken(f"{rank.name} acks {ack.operation} while it copies", ack.operation)
        self._participants[rank.machine.history, ack.operation] = participants_of(ack.participants, self._everyone)
        if ack.ok:
            key = (rank.machine.history, ack.operation)
            self._landed[key] = self._landed.get(key, 0) | 1 << rank.number

    def event(self, rank: SimulatedRank, history: int, index: int, text: str) -> None:
        verb, _, rest = text.partition(" ")
        landed = self._landed.get((history, rest), 0)
        if verb == "complete" and landed != self._participants.get((history, rest), self._everyone):
            raise self.broken(f"{rank.name} publishes {rest} when only ranks {landed:b} have copied it", rest)

    def copy_started(self, rank: SimulatedRank, copy: OpenCopy) -> None:
        op = rank.worker.cache.state.operations.get(copy.operation)
        if op is None:
            raise self.broken(f"{rank.name} copies for {copy.operation}, which is not open", copy.operation)
        pools = rank.worker.cache.state.pools
        keys = [op.page_keys()] * pools.page_pools + op.tail_keys()
        if copy.source is Tier.DEVICE and op.participants:
            keys = [self._kept_here(rank, op, held) for held in keys]
        wrong = rank.memory.wrong_by_pool(copy.source, copy.source_slots, keys)
        if wrong:
            raise self.broken(f"{rank.name}: {copy.operation} reads, where {wrong}", copy.operation)

    def _kept_here(self, rank: SimulatedRank, op: Operation, keys: list[PageKey]) -> list[PageKey]:
        """Of the pages of a write those that this rank keeps for others too."""
        shares = self.world.shape.shares(rank.number)
        assert shares is not None
        assert op.reservation is not None
        slots = rank.worker.cache.state.pools.slots(Tier.HOST, op.reservation)[0]
        return [key for key, slot in zip(keys, slots, strict=True) if shares.share_of(slot) == shares.own]

    def read(self, rank: SimulatedRank, what: object, wrong: str) -> None:
        if wrong and not isinstance(what, int):
            raise self.broken(f"{rank.name}: {what} has landed, and {wrong}", str(what))

    def after_rank(self, rank: SimulatedRank) -> None:
        self._events += 1
        if self._events % _EVENTS_BETWEEN_AUDITS == 0 and not rank.worker.left:
            self._look_up(rank, self.world.shape.shares(rank.number))

    def finish(self) -> None:
        for rank in self.world.ranks:
            self._look_up(rank, None)

    def _look_up(self, rank: SimulatedRank, shares: Shares | None) -> None:
        """Every page that a lookup finds holds its bytes. With `shares` only what is on the host here: ranks that keep
        the others may be ahead, and have evicted what this one will before it could read it."""
        tree = rank.worker.cache.state.tree
        for path in PROMPTS:
            for segment in tree.match(path).segments:
                keys, slots = path[segment.first : segment.first + segment.count], segment.slots
                if shares is not None and segment.tier is Tier.HOST:
                    here = [at for at, slot in enumerate(slots[0]) if shares.share_of(slot) == shares.own]
                    keys, slots = [keys[at] for at in here], tuple([[pool[at] for at in here] for pool in slots])
                wrong = rank.memory.wrong(segment.tier, slots, keys)
                if wrong:
                    raise self.broken(f"{rank.name}: a lookup finds a page, where {wrong}")
        self._look_up_ends(rank)

    def _look_up_ends(self, rank: SimulatedRank) -> None:
        """Every page that has a slot in a pool of ends has its bytes there."""
        tree, pools = rank.worker.cache.state.tree, rank.worker.cache.state.pools
        for tier in Tier:
            ends = [book.pages for book in tree.tails.on(tier)]
            slots = pools.beside_pages(tuple([[page.slot for page in pages.values()] for pages in ends]))
            keys: list[list[PageKey]] = [[] for _ in range(pools.page_pools)]
            wrong = rank.memory.wrong_by_pool(tier, slots, keys + [list(pages) for pages in ends])
            if wrong:
                raise self.broken(f"{rank.name}: a lookup finds the end of a prefix, where {wrong}")
