"""Every broken variant, and how soon the simulation or the exploration finds each: the proof that checkers can fail."""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvcoord.simulation.campaign import broken_by, make_world
from kvcoord.simulation.exploration import Explorer
from kvcoord.simulation.variant import Variant, applied
from kvcoord.simulation.variants_coordinator import COORDINATOR_VARIANTS
from kvcoord.simulation.variants_ends import ENDS_VARIANTS
from kvcoord.simulation.variants_rank import RANK_VARIANTS
from kvcoord.simulation.variants_shares import SHARES_VARIANTS
from kvcoord.simulation.variants_worker import WORKER_VARIANTS

VARIANTS: Final = (*COORDINATOR_VARIANTS, *RANK_VARIANTS, *WORKER_VARIANTS, *ENDS_VARIANTS, *SHARES_VARIANTS)

SEEDS_MAX: Final = 120
"""The budget of one variant."""


class VariantFound(msgspec.Struct, frozen=True):
    """One row of the table. `found_by` is empty when the budget was not enough."""

    variant: str
    breaks: str
    found_by: str
    after: str


def search(variant: Variant, seeds_max: int = SEEDS_MAX) -> VariantFound:
    """Explores its scope if it has one, else runs worlds with it, until a promise breaks."""
    steps = 0
    with applied(variant):
        if variant.scope is not None:
            explored = Explorer(variant.scope).explore()
            found_by = f"exploration: {explored.violation.partition(':')[0]}" if explored.violation else ""
            return VariantFound(variant.name, variant.breaks, found_by, f"{explored.states} states")
        for seed in range(seeds_max):
            world = make_world(variant.options, seed)
            violation = broken_by(world)
            steps += world.steps
            if violation is not None:
                found_by = f"simulation: {violation.promise}"
                return VariantFound(variant.name, variant.breaks, found_by, f"{seed + 1} seeds, {steps} events")
    return VariantFound(variant.name, variant.breaks, "", f"{seeds_max} seeds, {steps} events")


def search_all(
    seeds_max: int = SEEDS_MAX, on_found: Callable[[VariantFound], None] = lambda found: None
) -> Iterator[VariantFound]:
    """Every variant in turn."""
    for variant in VARIANTS:
        found = search(variant, seeds_max)
        on_found(found)
        yield found
