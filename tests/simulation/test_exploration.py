"""Every order of events of small groups, and what the exploration finds when the recovery rule is broken."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvcoord.simulation.exploration import Explorer
from kvcoord.simulation.scopes import SCOPES, Scope
from kvcoord.simulation.variant import Variant, applied
from kvcoord.simulation.variants import VARIANTS

MODEL = Path(__file__).resolve().parents[3] / "shared" / "failover_model.py"

STATES_MAX = 60_000

ONE_OPERATION = Scope(name="failover", coordinators=2, suspect=2, states_max=STATES_MAX)


def variant_named(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.name)
def test_no_order_of_events_breaks_a_promise(scope: Scope) -> None:
    explored = Explorer(msgspec.structs.replace(scope, states_max=20_000)).explore()
    print(f"{explored.states} states, {'all' if explored.complete else 'bounded'}")
    assert explored.violation == "", explored.path
    assert explored.states > 1000
    assert explored.commits > 0


def test_a_change_of_coordinator_can_end_in_commit_and_in_abort_and_never_in_both() -> None:
    explored = Explorer(ONE_OPERATION).explore()
    assert explored.complete
    assert explored.violation == ""
    assert min(explored.commits, explored.aborts) > 1000


@pytest.mark.parametrize(
    ("variant", "scope"),
    [
        ("two_coordinators", ONE_OPERATION),
        ("old_decision_taken", Scope(name="", lose=1, repeat=1, states_max=STATES_MAX)),
        ("known_commit_aborted", ONE_OPERATION),
        ("majority_commits", Scope(name="", ranks=3, states_max=STATES_MAX)),
        ("duplicate_vote_counts", Scope(name="", twice=1, states_max=STATES_MAX)),
        ("acks_counted", Scope(name="", ranks=3, twice=1, states_max=STATES_MAX)),
        ("failed_copy_landed", Scope(name="", fail=1, states_max=STATES_MAX)),
    ],
)
def test_a_broken_rule_is_found_with_the_shortest_way_to_it(variant: str, scope: Scope) -> None:
    with applied(variant_named(variant)):
        explored = Explorer(scope).explore()
    assert explored.violation, explored.states
    assert explored.path


@pytest.mark.skipif(not MODEL.exists(), reason="the model of the recovery rule is not beside this checkout")
@pytest.mark.parametrize(("fence", "holds"), [("fence", True), ("nofence", False)])
def test_the_hand_made_model_and_the_machines_agree_on_the_fence(fence: str, holds: bool) -> None:
    model = subprocess.run(
        [sys.executable, str(MODEL), "accept", fence, "1", "0"], capture_output=True, text=True, check=False
    )
    assert model.stdout.startswith("ok:") is holds
    if holds:
        assert Explorer(ONE_OPERATION).explore().violation == ""
        return
    with applied(variant_named("two_coordinators")):
        assert Explorer(ONE_OPERATION).explore().violation
