"""Broken variants of host pages that are kept once, by one of the ranks that hold the same bytes."""

from typing import Any, Final

from kvcoord.controller.kept_shares import SharedKeeping
from kvcoord.controller.transfers import Transfers
from kvcoord.domain import Tier
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variant import Patch, Variant

_REPLICATED: Final = Options(ranks=4, replicated=True, steps=24, fault_s=10.0)


def _frees_alone() -> list[Patch]:
    return [(Transfers, "_kept_once", lambda _self, _op: False)]


def _unpins_at_own_end() -> list[Patch]:
    """The rank that keeps a page lets go of it when its own load-back of it is over."""
    original = Transfers.copy_ended

    def copy_ended(self: Any, operation: Any, error: Any) -> None:
        original(self, operation, error)
        op = self._state.operations.get(operation)
        if op is not None and op.tier is Tier.DEVICE:
            for pin in op.pins:
                self._state.tree.unpin(pin)
            op.pins = []

    return [(Transfers, "copy_ended", copy_ended)]


def _vouches_for_others() -> list[Patch]:
    def agreed(self: Any, spoken: Any) -> Any:
        pages = set().union(*spoken.values())
        below: dict[bytes, list[tuple[bytes, int]]] = {}
        for before, key, slot in sorted(pages):
            below.setdefault(before, []).append((key, slot))
        return below

    return [(SharedKeeping, "_keeps", lambda _self, _slot: True), (SharedKeeping, "_agreed", agreed)]


SHARES_VARIANTS: Final = (
    Variant(
        name="shared_slots_freed_alone",
        breaks="a host slot of all ranks is free when this rank's own copy is over",
        make=_frees_alone,
        options=Options(ranks=4, replicated=True, faults=12, fault_kinds=("fail_copies", "slow_copies", "hold_copies")),
    ),
    Variant(
        name="shared_page_unpinned_alone",
        breaks="a host page may go when this rank has read it, while others still do",
        make=_unpins_at_own_end,
        options=_REPLICATED,
    ),
    Variant(
        name="vouches_for_others",
        breaks="a rank says of pages in another rank's memory that they are kept",
        make=_vouches_for_others,
        options=_REPLICATED,
    ),
)
