"""One acquire: which of its pages are where, what it pins, which slots it needs, and the slots of the whole path.

In pools that keep only ends it needs the end of what is cached, from which the engine goes on, and the end of the path,
which the engine computes. It decides nothing.
"""

from collections.abc import Sequence

from kvcoord.controller.leases import Lease
from kvcoord.controller.operations import Call, Operation, Run, runs_of
from kvcoord.controller.state import CacheState
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import OperationId, OperationKind, PageKey, Path, Tier
from kvcoord.index.results import Segment
from kvcoord.index.tails import Positions
from kvcoord.memory.reservation import Refusal, Reservation
from kvcoord.protocol.local import NO_SLOT


class Acquisition:
    """From `look` until it is answered. `slots` and `tail_slots`, one list for each pool, have holes until `fill`."""

    __slots__ = (
        "_pages_new",
        "_state",
        "call",
        "copies_open",
        "error",
        "landed",
        "lease",
        "new",
        "operation",
        "shared",
        "slots",
        "tail_slots",
    )

    def __init__(self, state: CacheState, call: Call, lease: Lease, operation: Operation, landed: bool) -> None:
        self.call = call
        self.lease = lease
        self.operation = operation
        self.landed = landed
        self.slots: list[list[int]] = [[] for _ in range(state.pools.page_pools)]
        self.tail_slots = [[NO_SLOT] * len(lease.keys) for _ in state.pools.windows]
        self.shared: dict[OperationId, Operation] = {}
        self.new: Reservation | None = None
        self.copies_open = 0
        self.error = ""
        self._state = state
        self._pages_new = len(lease.keys) - lease.first_new

    @property
    def pages_missing(self) -> int:
        """Pages that need a device slot: to be loaded, and new."""
        return self.operation.pages + self._pages_new

    @property
    def tails_missing(self) -> Sequence[int]:
        """The same in each pool that keeps only ends."""
        if not self._state.tree.hybrid:
            return ()
        new = self._state.pools.ends(self._pages_new)
        return [load + compute for load, compute in zip(self.operation.tail_counts, new, strict=True)]

    def reserve(self) -> Refusal | None:
        """Slots for the pages to load and the new ones: both or none."""
        pools, op, pages = self._state.pools, self.operation, self._pages_new
        load = pools.reserve(Tier.DEVICE, op.pages, op.id, op.tail_counts)
        new = pools.reserve(Tier.DEVICE, pages, self.lease.owner, pools.ends(pages))
        if isinstance(load, Reservation) and isinstance(new, Reservation):
            op.reservation, self.new = load, new
            return None
        for held in (load, new):
            if isinstance(held, Reservation):
                held.abort()
        needed = [self.pages_missing] * pools.page_pools + [*self.tails_missing]
        short = [count - pool.free_count for pool, count in zip(pools.device, needed, strict=True)]
        return Refusal(op.id, {pool.name: by for pool, by in zip(pools.device, short, strict=True) if by > 0})

    def fill(self) -> None:
        """Puts the reserved slots into the holes, and the new ones at the end."""
        op, own, pools = self.operation, self.lease.own, self._state.pools
        assert op.reservation is not None
        loaded = pools.slots(Tier.DEVICE, op.reservation)
        for held, pool, new in zip(self.slots, loaded, own, strict=False):
            at = 0
            for first, count in op.runs:
                held[first : first + count] = pool[at : at + count]
                at += count
            held.extend(new)
        if not self.tail_slots:
            return
        ends = zip(self.tail_slots, op.tails, loaded[pools.page_pools :], own[pools.page_pools :], strict=True)
        for held, positions, pool, new in ends:
            for at, slot in zip(positions, pool, strict=True):
                held[at] = slot
            held[len(held) - len(new) :] = new

    def place(self, segments: Sequence[Segment], transfers: Transfers) -> None:
        """Pins what is on the device, and finds the slots of what is there or on its way."""
        lease, tree = self.lease, self._state.tree
        for segment in segments:
            if segment.tier is Tier.DEVICE:
                lease.pins.append(tree.pin(lease.keys, segment.first, segment.count, Tier.DEVICE))
                for held, more in zip(self.slots, segment.slots, strict=True):
                    held.extend(more)
            else:
                self._place_host(segment, transfers)
        if tree.hybrid:
            self._place_tails(transfers)

    def _place_host(self, segment: Segment, transfers: Transfers) -> None:
        """Slots of a host segment: those of others' load-backs, and holes for what is to be loaded."""
        loading, keys = self._state.in_flight[Tier.DEVICE], self.lease.keys
        for at in range(segment.first, segment.first + segment.count):
            found = loading.get(keys[at])
            if found is None:
                for held in self.slots:
                    held.append(NO_SLOT)
                continue
            other, position = found
            self.shared[other.id] = other
            for held, pool in zip(self.slots, transfers.destination(other), strict=False):
                held.append(pool[position])

    def _place_tails(self, transfers: Transfers) -> None:
        """The same for the end of what is cached, in the pools that keep only ends."""
        lease, tails, pools = self.lease, self._state.tree.tails, self._state.pools
        ends = tails.ends(lease.first_new)
        for number, (book, positions) in enumerate(zip(tails.on(Tier.DEVICE), ends, strict=True)):
            loading, held = self._state.tails_in_flight[Tier.DEVICE][number], self.tail_slots[number]
            for at in positions:
                page, found = book.pages.get(lease.keys[at]), loading.get(lease.keys[at])
                if page is not None:
                    held[at] = page.slot
                elif found is not None:
                    other, position = found
                    self.shared[other.id] = other
                    held[at] = transfers.destination(other)[pools.page_pools + number][position]
        lease.tail_pins.append(tails.pin_there(Tier.DEVICE, lease.keys, ends))


def look(state: CacheState, transfers: Transfers, keys: list[PageKey], call: Call, *, landed: bool) -> Acquisition:
    """Matches the path, and takes the pins on what is there and on what is to be loaded."""
    serial = state.next_serial()
    state.tick += 1
    lease = Lease(serial, keys, state.tick)
    match = state.tree.match(keys)
    state.tree.touch(keys, state.tick)
    lease.first_new = match.pages
    lease.device_pages, lease.host_pages = match.device_pages, match.host_pages
    to_load = unloaded(state, keys, match.segments)
    tails = _tails_unloaded(state, keys, match.pages) if state.tree.hybrid else ()
    kind = OperationKind.LOAD_BACK if to_load or any(tails) else OperationKind.ALLOCATE
    op = Operation(kind, serial, 0, Tier.DEVICE, keys, to_load, tails)
    op.tick, op.path = state.tick, Path.IMMEDIATE
    transfers.pin_source(op, Tier.HOST)
    wanted = Acquisition(state, call, lease, op, landed)
    wanted.place(match.segments, transfers)
    return wanted


def unloaded(state: CacheState, keys: list[PageKey], segments: Sequence[Segment]) -> list[Run]:
    """The pages of host segments that nobody is loading."""
    loading = state.in_flight[Tier.DEVICE]
    runs: list[Run] = []
    for segment in segments:
        if segment.tier is Tier.DEVICE:
            continue
        if not loading:
            runs.append((segment.first, segment.count))
            continue
        pages = range(segment.first, segment.first + segment.count)
        runs += runs_of([at for at in pages if keys[at] not in loading])
    return runs


def _tails_unloaded(state: CacheState, keys: list[PageKey], prefix: int) -> Positions:
    """Pages of the end of what is cached whose slots are on the host only, and that nobody is loading."""
    loading = state.tails_in_flight[Tier.DEVICE]
    late = zip(state.tree.tails.to_load(keys, prefix), loading, strict=True)
    return tuple([[at for at in positions if keys[at] not in others] for positions, others in late])
