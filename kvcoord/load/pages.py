"""An engine's device pages in a replay: filled with bytes derived from the page key, and read back against them.

Stands in for a forward pass, which writes the pages it computes and reads those it reuses. Where a pool keeps nothing
of a page, there is NO_SLOT in place of its slot. Knows nothing of leases.
"""

from collections.abc import Iterator, Sequence

from kvcoord.domain import PageKey, Rank
from kvcoord.load.pattern import page_bytes, verify
from kvcoord.memory.pages import PageMemory
from kvcoord.protocol.local import NO_SLOT


class EnginePages:
    """The pages of one pool on one rank, layer-first. Parts of a layer count as layers. Mapped until `close`."""

    def __init__(self, memory: PageMemory, rank: Rank) -> None:
        self._buffer = memory.buffer()
        self._rank = rank
        self._pool = memory.geometry.name
        self._layers = range(memory.geometry.plane_count)
        self._layer_stride = memory.plane_stride
        self._page_bytes = memory.geometry.plane_bytes

    def fill(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Writes all layers of these pages."""
        keys, slots = present(keys, slots)
        buffer, size = self._buffer, self._page_bytes
        for first, slot, count in adjacent(slots):
            start = slot * size
            end = start + count * size
            for layer in self._layers:
                buffer[start:end] = self._expected(keys[first : first + count], layer)
                start += self._layer_stride
                end += self._layer_stride

    def count_corrupt(self, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """Pages of which at least one layer holds other bytes than it should."""
        keys, slots = present(keys, slots)
        buffer, size = self._buffer, self._page_bytes
        corrupt = 0
        for first, slot, count in adjacent(slots):
            start = slot * size
            end = start + count * size
            for layer in self._layers:
                if bytes(buffer[start:end]) != self._expected(keys[first : first + count], layer):
                    corrupt += sum(self._corrupt(keys[first + at], slot + at) for at in range(count))
                    break
                start += self._layer_stride
                end += self._layer_stride
        return corrupt

    def close(self) -> None:
        self._buffer.release()

    def _expected(self, keys: Sequence[PageKey], layer: int) -> bytes:
        rank, pool, size = self._rank, self._pool, self._page_bytes
        return b"".join([page_bytes(key, layer, rank, pool, size) for key in keys])

    def _corrupt(self, key: PageKey, slot: int) -> bool:
        size = self._page_bytes
        starts = (layer * self._layer_stride + slot * size for layer in self._layers)
        return not all(
            verify(self._buffer[start : start + size], key, layer, self._rank, self._pool)
            for layer, start in zip(self._layers, starts, strict=True)
        )


def present(keys: Sequence[PageKey], slots: Sequence[int]) -> tuple[Sequence[PageKey], Sequence[int]]:
    """Those of the pages of which this pool keeps something."""
    if NO_SLOT not in slots:
        return keys, slots
    held = [at for at, slot in enumerate(slots) if slot != NO_SLOT]
    return [keys[at] for at in held], [slots[at] for at in held]


def adjacent(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position in `slots`, first slot, count) for each run of ascending neighbours."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield first, slots[first], at - first
            first = at
