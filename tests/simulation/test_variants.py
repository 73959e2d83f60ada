"""Checkers that can fail: every broken variant of the machines and the worker is found within its budget."""

import inspect
import warnings

import pytest

from kvcoord.simulation.campaign import broken_by, make_world
from kvcoord.simulation.variant import Variant, applied
from kvcoord.simulation.variants import SEEDS_MAX, VARIANTS, search


def test_there_are_at_least_twenty_variants_each_with_a_name_of_its_own() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) >= 20


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_is_called_as_what_it_stands_for(variant: Variant) -> None:
    """One that cannot be called is found at once, and shows nothing."""
    for owner, name, patched in variant.make():
        original = vars(owner).get(name)
        if inspect.isfunction(original) and inspect.isfunction(patched):
            parameters = inspect.signature(original).parameters.values()
            named = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
            inspect.signature(patched).bind(*([None] * (len(parameters) - len(named))), **named)


@pytest.mark.filterwarnings("ignore:reservation of:ResourceWarning")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_broken_variant_is_found(variant: Variant) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = search(variant, SEEDS_MAX)
    assert found.found_by.startswith(("simulation: ", "exploration: ")), found
    assert found.after


def test_the_machines_are_whole_again_after_a_variant() -> None:
    variant = VARIANTS[0]
    before = [vars(owner).get(name) for owner, name, _ in variant.make()]
    with applied(variant):
        pass
    assert [vars(owner).get(name) for owner, name, _ in variant.make()] == before
    assert broken_by(make_world(variant.options, 0)) is None
