"""`kvcoord simulate` as a user sees it."""

import json

import pytest
from click.testing import CliRunner

from kvcoord.cli import commands
from kvcoord.simulation.variant import applied
from kvcoord.simulation.variants import VARIANTS

SMALL = ["simulate", "--seeds", "3", "--ranks", "2", "--steps", "8"]


def test_numbers_come_as_one_object() -> None:
    result = CliRunner().invoke(commands, [*SMALL, "--seed", "5", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"seeds", "steps", "operations", "recoveries", "faults", "promises", "violations"}
    assert report["seeds"] == 3
    assert report["violations"] == []
    assert len(report["promises"]) == 10


def test_people_get_a_table() -> None:
    result = CliRunner().invoke(commands, SMALL)
    assert result.exit_code == 0, result.output
    assert "promise quiescence checked" in result.stdout


@pytest.mark.parametrize("option", ["--json", None])
def test_a_broken_promise_is_told_with_its_story_and_ends_with_code_1(option: str | None) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == "majority_commits")
    with applied(variant):
        arguments = ["simulate", "--seeds", "6", "--ranks", "3", "--steps", "8", *([option] if option else [])]
        result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 1
    if option is None:
        assert "validity broken at" in result.stdout
        return
    (first, *_) = json.loads(result.stdout)["violations"]
    assert first["promise"] == "validity"
    assert first["story"]


def test_tp_and_pp_that_do_not_make_the_ranks_are_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["simulate", "--ranks", "4", "--tp", "3", "--pp", "2"], standalone_mode=False)
    assert ended.value.code not in (0, 1)
