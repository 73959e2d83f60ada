"""The host tier between two histories: what every rank still holds is kept, the rest is dropped everywhere.

A history ends when an engine ends, or when ranks come together that cannot go on from what they have. The bytes in the
host pools are as good as before, since a page key names what a page holds; only which pages *all* ranks hold has to be
agreed, before the first call of the new history is taken:

    HELD --every rank holds some--> VOTED, portion by portion, the keys of each intersected --> KEPT
      +---one holds none, or a portion was aborted: that is dropped---> (nothing)

Portions are ranges of keys, so that all ranks vote on the same ones and a vote stays below the limit of a message; how
many there are follows from the largest number of keys that a rank has reported. A slot in a pool that keeps only ends
has a key of its own, and is kept only with its page. Pages that are kept begin with equal use, so that they are evicted
in the same order. It knows nothing of bytes, models or messages.
"""

from typing import Final

import msgspec

from kvcoord.controller.consensus import Consensus
from kvcoord.controller.operations import runs_of
from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import Agreement, OperationId, OperationKind, PageKey, Tier
from kvcoord.index.node import Slots
from kvcoord.index.results import Branch
from kvcoord.protocol.messages import Decision, Vote

KEPT: Final = "kept"
"""Owner of host slots whose pages are not agreed yet."""

_NAME: Final = "kept-pages/"
_KEY_BITS: Final = 32
"""Leading bits of a page key that say to which portion it belongs."""


class HostPages(msgspec.Struct, frozen=True):
    """What one rank's host tier holds when a history ends. `model` names what computed it.

    `tails` are slots by page, one mapping for each pool that keeps only ends.
    """

    branches: list[Branch] = []
    model: str = ""
    tails: list[dict[PageKey, int]] = []

    @property
    def count(self) -> int:
        """Keys to agree on."""
        pages = sum([len(branch.keys) for branch in self.branches if branch.slots is not None])
        return pages + sum(map(len, self.tails))


NOTHING: Final = HostPages()


def host_pages(state: CacheState, model: str) -> HostPages:
    """The published host pages of a cache that has been abandoned; none when it is not known what computed them."""
    if not model:
        return NOTHING
    tails = [{key: page.slot for key, page in book.pages.items()} for book in state.tree.tails.on(Tier.HOST)]
    return HostPages(state.tree.outline(Tier.HOST), model, tails)


def held_keys(state: CacheState) -> int:
    """The keys that these would be."""
    return state.tree.pages(Tier.HOST) + sum(state.tree.tails.counts(Tier.HOST))


class Keeping:
    """One rank's part in agreeing what is kept. `open` from `begin` until it is settled.

    `keys_max` bounds the keys of one vote; what a rank holds beyond in one portion it drops, and so do all.
    """

    def __init__(self, keys_max: int) -> None:
        self.pages = NOTHING
        self.open = False
        self._keys_max = keys_max
        self._history = 0
        self._portions: list[list[bytes]] = []
        self._next = 0
        self._agreed: set[bytes] = set()

    def hold(self, pages: HostPages, state: CacheState) -> None:
        """Claims the slots of these pages in a cache that is empty."""
        self.pages = pages
        for branch in pages.branches:
            if branch.slots is not None:
                for pool, slots in zip(state.pools.host, branch.slots, strict=False):
                    pool.claim(slots, KEPT)
        for pool, held in zip(state.pools.host[state.pools.page_pools :], pages.tails, strict=False):
            pool.claim(list(held.values()), KEPT)

    def begin(self, history: int, least: int, most: int, state: CacheState, consensus: Consensus) -> None:
        """A history begins, in which ranks hold between `least` and `most` keys from before."""
        self.open = True
        self._history = history
        self._agreed.clear()
        self._next = 0
        self._portions = self._divided(most) if least else []
        self._vote(state, consensus)

    def decide(self, decision: Decision, state: CacheState, consensus: Consensus) -> bool:
        """The outcome of one portion. Whether it was one; one that this rank has not come to is asked for later."""
        if not decision.operation.startswith(_NAME):
            return False
        if self.open and decision.operation == self._operation():
            self._take(decision)
            self._vote(state, consensus)
        return True

    def _vote(self, state: CacheState, consensus: Consensus) -> None:
        """Goes on with the next portion, for as long as decisions are there already."""
        while self._next < len(self._portions):
            value = sorted(self._portions[self._next])[: self._keys_max]
            vote = Vote(self._operation(), OperationKind.CUSTOM, True, Agreement.INTERSECT, value=value)
            decision = consensus.propose(vote, deferred=False)
            if decision is None:
                return
            self._take(decision)
        self._settle(state)

    def _take(self, decision: Decision) -> None:
        if isinstance(decision.value, list):
            self._agreed.update(decision.value)
        self._next += 1

    def _settle(self, state: CacheState) -> None:
        """Publishes what is agreed, gives everything else back."""
        kept = 0
        for branch in self.pages.branches:
            if branch.slots is not None:
                kept += self._publish(branch, branch.slots, state)
        ends = [
            [slot for key, slot in held.items() if not self._keeps(n, key)] for n, held in enumerate(self.pages.tails)
        ]
        state.pools.free_slots(Tier.HOST, state.pools.beside_pages(tuple(ends)), KEPT)
        if kept:
            state.digest.apply(f"keep {kept}")
        self.pages = NOTHING
        self.open = False
        self._portions = []
        self._agreed.clear()

    def _publish(self, branch: Branch, slots: Slots, state: CacheState) -> int:
        """The agreed pages of one branch. Returns how many."""
        places = [at for at, key in enumerate(branch.keys) if key in self._agreed]
        dropped = [at for at, key in enumerate(branch.keys) if key not in self._agreed]
        state.pools.free_slots(Tier.HOST, [[pool[at] for at in dropped] for pool in slots], KEPT)
        if not places:
            return 0
        state.pools.hand_over(Tier.HOST, [[pool[at] for at in places] for pool in slots], KEPT, INDEX)
        path = self._path(branch)
        first = len(path) - len(branch.keys)
        for at, count in runs_of(places):
            taken = [pool[at : at + count] for pool in slots]
            state.tree.publish_host(path[: first + at + count], first + at, count, taken)
        self._publish_tails(path, [first + at for at in places], state)
        return len(places)

    def _publish_tails(self, path: list[PageKey], places: list[int], state: CacheState) -> None:
        """The agreed ends at these pages, which have just been published."""
        tails = self.pages.tails
        at = tuple([[place for place in places if self._keeps(number, path[place])] for number in range(len(tails))])
        slots = tuple([[held[path[place]] for place in of_pool] for held, of_pool in zip(tails, at, strict=True)])
        if any(at):
            state.pools.hand_over(Tier.HOST, state.pools.beside_pages(slots), KEPT, INDEX)
            state.tree.publish_tails(Tier.HOST, path, at, slots)

    def _keeps(self, number: int, key: PageKey) -> bool:
        """Whether all ranks have this page, and its slot in this pool of ends."""
        return key in self.pages.tails[number] and key in self._agreed and _end_key(number, key) in self._agreed

    def _path(self, branch: Branch) -> list[PageKey]:
        parts = [branch.keys]
        while branch.above >= 0:
            branch = self.pages.branches[branch.above]
            parts.append(branch.keys)
        return [key for part in reversed(parts) for key in part]

    def _operation(self) -> OperationId:
        return f"{_NAME}{self._history}/{self._next}"

    def _divided(self, most: int) -> list[list[bytes]]:
        """This rank's keys by portion. As many portions on every rank, so that none should have too many keys."""
        bits = 0
        while most > (3 * self._keys_max << bits) // 4 and bits < _KEY_BITS:
            bits += 1
        portions: list[list[bytes]] = [[] for _ in range(1 << bits)]
        shift = _KEY_BITS - bits
        keys = [key for branch in self.pages.branches if branch.slots is not None for key in branch.keys]
        for number, held in enumerate(self.pages.tails):
            keys += [_end_key(number, key) for key in held]
        for key in keys:
            portions[int.from_bytes(key[: _KEY_BITS // 8], "big") >> shift].append(key)
        return portions


def _end_key(number: int, key: PageKey) -> bytes:
    """Stands for the slot of a page in one pool that keeps only ends."""
    return key + number.to_bytes(2, "big")
