"""What an engine that copies pages is given and what it promises. Implementations are beside this file.

A plan is checked when it is made, so an engine never meets slots that do not exist. Whether the pages may be copied
now (nobody else writes them, nobody frees them before the copy is over) is for the caller to know.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from kvcoord.dma.pieces import pieces_by_layer, runs
from kvcoord.dma.transfer import Transfer
from kvcoord.errors import UsageError
from kvcoord.memory.pages import Hold, Pages


class Direction(StrEnum):
    DEVICE_TO_HOST = "device-to-host"
    HOST_TO_DEVICE = "host-to-device"


class PoolCopy:
    """The pages of one pool that one plan moves, all layers of each. Keeps runs, not the slot lists.

    `layers` are the pairs of planes to copy between, by layer; `pieces` is what to move in each of them. The layouts of
    the two sides may differ. Raises UsageError for lists of unequal length, slots outside a memory, or memories whose
    pages differ in shape.
    """

    __slots__ = ("destination", "layers", "page_count", "pieces", "runs", "source")

    def __init__(
        self,
        source: Pages,
        destination: Pages,
        source_slots: Sequence[int],
        destination_slots: Sequence[int],
    ) -> None:
        _check_shape(source, destination)
        if len(source_slots) != len(destination_slots):
            lengths = (len(source_slots), len(destination_slots))
            raise UsageError("slots", lengths, "give as many destination slots as source slots")
        _check_slots("source_slots", source, source_slots)
        _check_slots("destination_slots", destination, destination_slots)
        self.source = source
        self.destination = destination
        self.page_count = len(source_slots)
        self.runs = runs(source_slots, destination_slots)
        self.layers, self.pieces = pieces_by_layer(source, destination, self.runs)

    @property
    def layer_count(self) -> int:
        return self.source.geometry.layer_count

    @property
    def total_bytes(self) -> int:
        return self.page_count * self.source.geometry.whole_page_bytes

    @property
    def piece_count(self) -> int:
        return len(self.pieces) * sum([len(pairs) for pairs in self.layers])


class CopyPlan(msgspec.Struct, frozen=True):
    """One transfer: pages of one or several pools, in one direction. `name` is the operation's, for reports.

    Pools may have different layer counts: layer i has landed when it has in every pool that has a layer i.
    Raises UsageError without a pool.
    """

    name: str
    direction: Direction
    pools: tuple[PoolCopy, ...]

    def __post_init__(self) -> None:
        if not self.pools:
            raise UsageError("pools", self.pools, f"name at least one pool to copy for {self.name}")

    @property
    def layer_count(self) -> int:
        return max(pool.layer_count for pool in self.pools)

    @property
    def total_bytes(self) -> int:
        return sum([pool.total_bytes for pool in self.pools])

    @property
    def run_count(self) -> int:
        """Pieces of memory to move: one for each run in each plane, where the layouts allow it."""
        return sum([pool.piece_count for pool in self.pools])

    def lease(self) -> list[Hold]:
        """Keep all memories of the plan mapped until the holds are released. Raises UsageError if one is closed."""
        held: list[Hold] = []
        try:
            for pool in self.pools:
                for memory in (pool.source, pool.destination):
                    held.append(memory.hold())
        except UsageError:
            for hold in held:
                hold.release()
            raise
        return held


class DirectionStatistics(msgspec.Struct, frozen=True):
    """Settled transfers of one direction since the engine was made.

    `copied_bytes` and `runs` (pieces of memory moved) leave out failed transfers; `copying_s` includes them.
    """

    transfers: int = 0
    failed: int = 0
    copied_bytes: int = 0
    runs: int = 0
    copying_s: float = 0.0


class CopyStatistics(msgspec.Struct, frozen=True):
    device_to_host: DirectionStatistics
    host_to_device: DirectionStatistics


class CopyEngine(Protocol):
    """Copies pages without blocking the loop it was made for. Called on that loop's thread only.

    Transfers of one direction settle in the order in which they were submitted, never inside `submit`.
    A copy that was started is never cancelled, and its memory stays mapped until it is over.
    """

    def submit(self, plan: CopyPlan) -> Transfer:
        """Start a copy. Raises UsageError, before anything is copied, when the engine or a memory is closed or
        too many transfers are open."""
        ...

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of submitted transfers that have not settled."""
        ...

    def statistics(self) -> CopyStatistics: ...

    async def close(self) -> None:
        """Refuse new copies, wait for those under way, end threads. May be called again."""
        ...


def _check_shape(source: Pages, destination: Pages) -> None:
    left, right = source.geometry, destination.geometry
    for field in ("layer_count", "page_bytes", "dtype", "parts"):
        ours, theirs = getattr(left, field), getattr(right, field)
        if ours != theirs:
            raise UsageError(field, (ours, theirs), f"copy between pages of one shape; {left.name} and {right.name}")


def _check_slots(field: str, memory: Pages, slots: Sequence[int]) -> None:
    if slots and not (min(slots) >= 0 and max(slots) < memory.capacity):
        outside = next(slot for slot in slots if not 0 <= slot < memory.capacity)
        raise UsageError(field, outside, f"pool {memory.geometry.name} has slots 0 to {memory.capacity - 1}")
