"""The host tier between two histories where pages are kept once: every rank says what it keeps, and all take that.

Whether a page is there is for the rank to say whose memory holds it: with one that has lost its own nothing else is
lost. Each rank puts votes of its own, in which it alone takes part, and whose values everybody is told:

    rank r, portion 0:  how to reach its memory, what computed its pages, and how many portions follow
    rank r, portion n:  when it reaches the memory of the others: some of its pages

A rank votes when none of its copies runs any more, so when all have voted nobody reads what anybody may now write, and
all can read what there is. A vote that was aborted (its group was suspended) is put again. Then every rank builds the
same index from what was said: pages that can be reached from the root, in the slots that they have. It knows nothing of
bytes or messages.
"""

from collections.abc import Iterator
from typing import Final

from kvcoord.controller.consensus import AgreedConsensus, Consensus
from kvcoord.controller.effects import MapHosts
from kvcoord.controller.kept import NOTHING, HostPages
from kvcoord.controller.placing import slots_digest
from kvcoord.controller.state import CacheState
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import PAGE_KEY_BYTES, Agreement, OperationId, OperationKind, Outcome, PageKey, Rank, Tier
from kvcoord.errors import InvariantBroken
from kvcoord.memory.shares import Shares
from kvcoord.protocol.messages import Decision, Vote

_NAME: Final = "kept-shares/"
_ROOT: Final = bytes(PAGE_KEY_BYTES)
_NUMBER_BYTES: Final = 4

_MEMORY: Final = b"m"
_MODEL: Final = b"c"
_PORTIONS: Final = b"p"
"""What an item of portion 0 says, by its first byte. Those of the others are runs of pages, as `_item` packs them."""

Page = tuple[PageKey, PageKey, int]
"""(key of the page before it, key, slot)."""

Run = tuple[PageKey, int, list[PageKey]]
"""(key of the page before the first, slot of the first, keys): pages that follow each other, in adjacent slots."""


class SharedKeeping:
    """One rank's part. `open` from `begin` until it is settled; then `model` is what computed the pages that are kept.

    `keys_max` bounds the pages of one vote.
    """

    def __init__(self, keys_max: int, shares: Shares) -> None:
        self.pages = NOTHING
        self.open = False
        self.model = ""
        self.memory = b""
        """How the other ranks reach the memory of this one."""
        self._keys_max = keys_max
        self._shares = shares
        self._history = 0
        self._portions: list[list[bytes]] = []
        self._next = self._attempt = 0
        self._mapping = self._mapped = False
        self._said: dict[Rank, dict[int, list[bytes]]] = {}

    def hold(self, pages: HostPages, state: CacheState) -> None:
        """Pages of an earlier life. Their slots are taken when it is agreed which are kept."""
        del state
        self.pages = pages

    def begin(self, history: int, least: int, most: int, state: CacheState, consensus: Consensus) -> None:
        """A history begins. How much the ranks hold from before makes no difference here."""
        del least, most
        self.open = True
        self._history = history
        self._said = {rank: {} for rank in range(self._shares.world_size)}
        self._portions = self._divided()
        self._next = self._attempt = 0
        self._mapping = self._mapped = False
        self._vote(state, consensus)

    def decide(self, decision: Decision, state: CacheState, consensus: Consensus) -> bool:
        """What one rank has said, or (aborted) must say again. Whether it was that."""
        if not decision.operation.startswith(_NAME):
            return False
        if self.open:
            self._take(decision)
            self._go_on(state, consensus)
        return True

    def mapped(self, history: int, state: CacheState, consensus: Consensus) -> None:
        """This rank reaches the memory of the others, as they have named it in this history."""
        if self.open and history == self._history:
            self._mapped = True
            self._go_on(state, consensus)

    def _go_on(self, state: CacheState, consensus: Consensus) -> None:
        if not self._mapping and all(0 in said for said in self._said.values()):
            self._mapping = True
            named = {rank: _told(self._said[rank][0], _MEMORY) for rank in self._shares.holders}
            state.effects.append(MapHosts(self._history, named))
        self._vote(state, consensus)
        if all(0 in said and len(said) > _number(_told(said[0], _PORTIONS)) for said in self._said.values()):
            self._settle(state, consensus)

    def _take(self, decision: Decision) -> None:
        """Notes it, unless it is of another history."""
        history, rank, portion, attempt = [int(part) for part in decision.operation[len(_NAME) :].split("/")]
        if history != self._history:
            return
        if decision.outcome is Outcome.COMMIT:
            assert isinstance(decision.value, list)
            self._said[rank].setdefault(portion, decision.value)
        if rank == self._shares.rank and (portion, attempt) == (self._next, self._attempt):
            if decision.outcome is Outcome.COMMIT:
                self._next, self._attempt = self._next + 1, 0
            else:
                self._attempt += 1

    def _vote(self, state: CacheState, consensus: Consensus) -> None:
        """This rank's next portion, for as long as decisions are there already."""
        while self._next < (len(self._portions) if self._mapped else 1):
            operation = self._operation()
            vote = Vote(
                operation,
                OperationKind.CUSTOM,
                True,
                Agreement.INTERSECT,
                participants=1 << self._shares.rank,
                value=self._portions[self._next],
            )
            decision = consensus.propose(vote, deferred=False)
            if decision is None:
                return
            self._take(decision)

    def _operation(self) -> OperationId:
        return f"{_NAME}{self._history}/{self._shares.rank}/{self._next}/{self._attempt}"

    def _divided(self) -> list[list[bytes]]:
        """What this rank has to say, by portion."""
        portions: list[list[bytes]] = []
        room = 0
        for before, slot, keys in self._runs():
            while keys:
                if not room:
                    portions.append([])
                    room = self._keys_max
                taken, keys = keys[:room], keys[room:]
                portions[-1].append(_item(before, slot, taken))
                before, slot, room = taken[-1], slot + len(taken), room - len(taken)
        model, count = self.pages.model.encode(), len(portions).to_bytes(_NUMBER_BYTES, "big")
        return [[_MEMORY + self.memory, _MODEL + model, _PORTIONS + count], *portions]

    def _runs(self) -> list[Run]:
        """The pages that this rank keeps."""
        runs: list[Run] = []
        ends: list[PageKey] = []
        for branch in self.pages.branches:
            before = ends[branch.above] if branch.above >= 0 else _ROOT
            ends.append(branch.keys[-1])
            if branch.slots is None:
                continue
            if any(pool != branch.slots[0] for pool in branch.slots):
                raise InvariantBroken("a page that is kept once has one slot number in all pools", str(branch.slots))
            next_slot = -1
            for key, slot in zip(branch.keys, branch.slots[0], strict=True):
                if not self._keeps(slot):
                    next_slot = -1
                elif slot == next_slot:
                    runs[-1][2].append(key)
                    next_slot += 1
                else:
                    runs.append((before, slot, [key]))
                    next_slot = slot + 1
                before = key
        return runs

    def _keeps(self, slot: int) -> bool:
        return self._shares.share_of(slot) == self._shares.own

    # --- what all have said ---------------------------------------------------------------------------------------

    def _settle(self, state: CacheState, consensus: Consensus) -> None:
        """Every rank has said everything."""
        models = {rank: _told(said[0], _MODEL).decode() for rank, said in self._said.items()}
        pages = {
            rank: {page for portion in range(1, len(said)) for item in said[portion] for page in _pages(item)}
            for rank, said in self._said.items()
        }
        self.model = next((models[rank] for rank in sorted(pages) if pages[rank]), "")
        spoken = {rank: held if models[rank] == self.model else set() for rank, held in pages.items()}
        slots = self._publish(self._agreed(spoken), state)
        if slots:
            state.digest.apply(f"keep {len(slots)} at {slots_digest(slots):x}")
        if isinstance(consensus, AgreedConsensus):
            consensus.agree(Tier.HOST, [pool.free_count for pool in state.pools.host])
        self.pages = NOTHING
        self.open = False
        self._portions = []
        self._said = {}

    def _agreed(self, spoken: dict[Rank, set[Page]]) -> dict[PageKey, list[tuple[PageKey, int]]]:
        """(key, slot) of the pages to keep, by the key of the page before: in each share what all its keepers have."""
        places: dict[PageKey, tuple[int, PageKey]] = {}
        for share in range(self._shares.count):
            keepers = [spoken[rank] for rank in range(share, self._shares.world_size, self._shares.count)]
            for before, key, slot in set.intersection(*keepers):
                places[key] = min((slot, before), places.get(key, (slot, before)))
        below: dict[PageKey, list[tuple[PageKey, int]]] = {}
        for key, (slot, before) in sorted(places.items()):
            below.setdefault(before, []).append((key, slot))
        return below

    def _publish(self, below: dict[PageKey, list[tuple[PageKey, int]]], state: CacheState) -> list[int]:
        """Publishes what can be reached, run by run. Returns the slots."""
        taken: list[int] = []
        waiting: list[list[PageKey]] = [[]]
        while waiting:
            path = waiting.pop()
            for key, slot in reversed(below.get(path[-1] if path else _ROOT, ())):
                run, keys = [slot], [*path, key]
                while len(following := below.get(keys[-1], [])) == 1:
                    keys.append(following[0][0])
                    run.append(following[0][1])
                for pool in state.pools.host:
                    pool.claim(run, INDEX)
                state.tree.publish_host(keys, len(path), len(run), [list(run) for _ in state.pools.host])
                taken += run
                waiting.append(keys)
        return taken


def _told(items: list[bytes], kind: bytes) -> bytes:
    return next(item[1:] for item in items if item.startswith(kind))


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


def _item(before: PageKey, slot: int, keys: list[PageKey]) -> bytes:
    """Pages that follow each other on a path and in their slots."""
    return b"".join([before, slot.to_bytes(_NUMBER_BYTES, "big"), *keys])


def _pages(item: bytes) -> Iterator[Page]:
    before, first = item[:PAGE_KEY_BYTES], PAGE_KEY_BYTES + _NUMBER_BYTES
    slot = _number(item[PAGE_KEY_BYTES:first])
    for at in range(first, len(item), PAGE_KEY_BYTES):
        key = item[at : at + PAGE_KEY_BYTES]
        yield before, key, slot
        before, slot = key, slot + 1
