"""Bytes as symbols: what each slot of one rank holds is the key of a page, or nothing that can be read.

Copies move these symbols, so a page that is read while it is overwritten, or handed out while a copy touches it,
shows as a wrong key at the moment it happens.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvcoord.controller.effects import StartCopy
from kvcoord.controller.tiers import INDEX
from kvcoord.domain import OperationId, PageKey, Tier
from kvcoord.memory.shares import Shares
from kvcoord.memory.slots import SlotPool, SlotState
from kvcoord.protocol.local import NO_SLOT

TORN: Final = b"torn"
"""What a slot holds while a copy writes it, and after that copy has failed."""

EMPTY: Final = b""

Slots = Sequence[Sequence[int]]


class SymbolicMemory:
    """Both tiers of one rank: for each pool a list with the content of each slot.

    Slots are given for the first pools, or for all. NO_SLOT is passed over: that pool has nothing of the page. With
    `shares` the host slots of other ranks are theirs, and can be read once this rank `follow`s them.
    """

    def __init__(self, device_slots: Sequence[int], host_slots: Sequence[int], shares: Shares | None = None) -> None:
        self.engine_life = 0
        """Counts the engines: each brings device memory of its own, and copies under way keep that of the last one."""
        own = [[EMPTY] * count for count in host_slots]
        self._cells: dict[Tier, Sequence[list[bytes] | CellsInShares]] = {
            Tier.DEVICE: [[EMPTY] * count for count in device_slots],
            Tier.HOST: own if shares is None else [CellsInShares(cells, shares) for cells in own],
        }

    def follow(self, share: int, other: "SymbolicMemory") -> None:
        """This share is in the memory of another rank."""
        for mine, theirs in zip(self._cells[Tier.HOST], other._cells[Tier.HOST], strict=True):
            assert isinstance(mine, CellsInShares)
            assert isinstance(theirs, CellsInShares)
            mine.parts[share] = theirs.parts[share]

    def next_engine(self) -> None:
        """Another engine, with its own device memory."""
        self.engine_life += 1
        self._cells[Tier.DEVICE] = [[EMPTY] * len(cells) for cells in self._cells[Tier.DEVICE]]

    def read(self, tier: Tier, slots: Slots) -> list[list[bytes]]:
        return [[cells[slot] for slot in held] for cells, held in zip(self._cells[tier], slots, strict=True)]

    def write(self, tier: Tier, slots: Slots, contents: Sequence[Sequence[bytes]]) -> None:
        for cells, held, content in zip(self._cells[tier], slots, contents, strict=True):
            for slot, symbol in zip(held, content, strict=True):
                if slot != NO_SLOT:
                    cells[slot] = symbol

    def fill(self, tier: Tier, slots: Slots, keys: Sequence[PageKey]) -> None:
        """The engine computes these pages: every pool gets its part of each."""
        self.write(tier, slots, [keys] * len(slots))

    def tear(self, tier: Tier, slots: Slots) -> None:
        self.write(tier, slots, [[TORN] * len(held) for held in slots])

    def wrong(self, tier: Tier, slots: Slots, keys: Sequence[PageKey]) -> str:
        """The first slot that does not hold its page, empty when all do. The same pages in all pools."""
        return self.wrong_by_pool(tier, slots, [keys] * len(slots))

    def wrong_by_pool(self, tier: Tier, slots: Slots, keys: Sequence[Sequence[PageKey]]) -> str:
        """The same where each pool has pages of its own."""
        for number, (cells, held, pages) in enumerate(zip(self._cells[tier], slots, keys, strict=False)):
            for slot, key in zip(held, pages, strict=True):
                if slot != NO_SLOT and cells[slot] != key:
                    return f"{tier} pool {number} slot {slot} holds {shown(cells[slot])} instead of {shown(key)}"
        return ""


class CellsInShares:
    """The host slots of one pool, numbered through the ranks that keep them."""

    def __init__(self, own: list[bytes], shares: Shares) -> None:
        self.parts: list[list[bytes]] = [[] for _ in range(shares.count)]
        self.parts[shares.own] = own
        self._shares = shares

    def __len__(self) -> int:
        return self._shares.count * self._shares.share_slots

    def __getitem__(self, slot: int) -> bytes:
        part = self.parts[self._shares.share_of(slot)]
        return part[self._shares.place(slot)] if part else EMPTY

    def __setitem__(self, slot: int, symbol: bytes) -> None:
        assert self._shares.share_of(slot) == self._shares.own, f"slot {slot} is in the memory of another rank"
        self.parts[self._shares.own][self._shares.place(slot)] = symbol


class OpenCopy:
    """A copy under way, with what its source held when it began."""

    __slots__ = (
        "contents",
        "destination",
        "destination_slots",
        "engine_life",
        "failing",
        "operation",
        "source",
        "source_slots",
    )

    def __init__(self, effect: StartCopy, memory: SymbolicMemory, failing: bool) -> None:
        self.operation: OperationId = effect.operation
        self.source = effect.source
        self.destination = Tier.HOST if effect.source is Tier.DEVICE else Tier.DEVICE
        self.source_slots = effect.source_slots
        self.destination_slots = effect.destination_slots
        self.contents = memory.read(effect.source, effect.source_slots)
        self.engine_life = memory.engine_life
        self.failing = failing


Misuse = Callable[[str], None]

Elsewhere = Callable[[str, int], str]
"""Which copies of other ranks touch a slot that these ranks have in common, by the pool's name. Empty for none."""


class WatchedPool(SlotPool):
    """A production pool that says when a slot is handed out or freed while a copy touches it.

    A slot that several ranks have in common is also watched for the copies of the others: when it is handed out, and
    when a published page leaves it. (What ends with its history is freed at once, and handed out by a new pool.)

    `changed` is set with every change and cleared by whoever checks the books.
    """

    __slots__ = ("_elsewhere", "_misuse", "changed", "touched")

    def __init__(self, pool: SlotPool, misuse: Misuse, elsewhere: Elsewhere) -> None:
        super().__init__(pool.name, pool.capacity, pool.share_count)
        self._elsewhere = elsewhere
        self.touched: dict[int, str] = {}
        self.changed = True
        self._misuse = misuse

    def touch(self, slots: Sequence[int], operation: OperationId) -> None:
        for slot in slots:
            self.touched[slot] = f"{self.touched.get(slot, '')} {operation}".strip()

    def untouch(self, slots: Sequence[int], operation: OperationId) -> None:
        for slot in slots:
            others = [name for name in self.touched.pop(slot, "").split() if name != operation]
            if others:
                self.touched[slot] = " ".join(others)

    def _assign(self, slots: list[int], run: slice | None, state: int, owner: str) -> None:
        self.changed = True
        if self.touched and state in (SlotState.FREE, SlotState.RESERVED):
            for slot in slots:
                if slot in self.touched:
                    verb = "freed" if state == SlotState.FREE else "handed out"
                    self._misuse(f"{self.name} slot {slot} is {verb} by {owner} while copied by {self.touched[slot]}")
        if self.share_count > 1 and (state == SlotState.RESERVED or (state == SlotState.FREE and owner == INDEX)):
            for slot in slots:
                others = self._elsewhere(self.name, slot)
                if others:
                    self._misuse(f"{self.name} slot {slot} goes through {owner} while another rank copies {others}")
        super()._assign(slots, run, state, owner)


def shown(symbol: bytes) -> str:
    """A symbol as people read it."""
    if symbol == EMPTY:
        return "nothing"
    return "torn bytes" if symbol == TORN else f"page {symbol.hex()[:8]}"
