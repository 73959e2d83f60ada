"""Which pieces of memory a set of pages is: the layouts of both sides turned into addresses, offsets and sizes.

A piece is contiguous on both sides. Pages that are neighbours on both sides become one *run*, and where a page's piece
lies right behind its neighbour's, a run becomes one piece. It does not know who moves the pieces.
"""

from collections.abc import Sequence

from kvcoord.memory.pages import Pages

Run = tuple[int, int, int]
"""Source slot, destination slot, count: that many pages adjacent on both sides."""

Piece = tuple[int, int, int]
"""Bytes from the plane's address on the source, the same on the destination, size in bytes."""

PlanePair = tuple[int, int]
"""Address of one plane on the source and on the destination."""


def runs(source_slots: Sequence[int], destination_slots: Sequence[int]) -> list[Run]:
    """Merge neighbours: pages that are adjacent and ascending on both sides become one run.

    The lists have equal length; the runs, in their order, name the same pairs of pages.
    """
    if not source_slots:
        return []
    merged: list[Run] = []
    first_source = next_source = source_slots[0]
    first_destination = next_destination = destination_slots[0]
    for source, destination in zip(source_slots, destination_slots, strict=True):
        if source != next_source or destination != next_destination:
            merged.append((first_source, first_destination, next_source - first_source))
            first_source, first_destination = source, destination
        next_source, next_destination = source + 1, destination + 1
    merged.append((first_source, first_destination, next_source - first_source))
    return merged


def pieces_by_layer(
    source: Pages, destination: Pages, copied: Sequence[Run]
) -> tuple[list[list[PlanePair]], list[Piece]]:
    """For each layer the planes to copy between, and the pieces of every one of these planes.

    Where both sides keep whole pages in one piece, all of it is done with the first layer, and the others have none.
    """
    geometry = source.geometry
    pairs = list(zip(source.planes, destination.planes, strict=True))
    if _whole_pages(source) and _whole_pages(destination):
        layers = [pairs[:1], *([] for _ in range(geometry.layer_count - 1))]
        return layers, _joined(copied, geometry.whole_page_bytes)
    layers = [pairs[first : first + geometry.parts] for first in range(0, len(pairs), geometry.parts)]
    piece_bytes = geometry.plane_bytes
    if source.slot_stride == destination.slot_stride == piece_bytes:
        return layers, _joined(copied, piece_bytes)
    source_stride, destination_stride = source.slot_stride, destination.slot_stride
    pieces = [
        ((from_slot + at) * source_stride, (to_slot + at) * destination_stride, piece_bytes)
        for from_slot, to_slot, count in copied
        for at in range(count)
    ]
    return layers, pieces


def _joined(copied: Sequence[Run], stride: int) -> list[Piece]:
    """Runs of pages whose pieces lie one right behind the other, on both sides."""
    return [(from_slot * stride, to_slot * stride, count * stride) for from_slot, to_slot, count in copied]


def _whole_pages(pages: Pages) -> bool:
    """Whether a page is one piece over all of its planes, and its neighbour the next."""
    geometry = pages.geometry
    if geometry.plane_count == 1 or pages.slot_stride != geometry.whole_page_bytes:
        return False
    first, step = pages.planes[0], geometry.plane_bytes
    return all(address == first + plane * step for plane, address in enumerate(pages.planes))
