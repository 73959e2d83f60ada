"""The map of scenarios: every one is played, and the table says by which tests."""

import re
import string
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LETTERS = string.ascii_uppercase[: string.ascii_uppercase.index("U") + 1]
REAL = set("DOPQRSTU")
"""What sockets, processes or bytes decide is also played by real processes."""

PREFIX = "test_scenario_"


def named_in(files: list[Path]) -> dict[str, set[str]]:
    """Names after the letter, by letter."""
    found: dict[str, set[str]] = {letter: set() for letter in LETTERS}
    for path in files:
        for letter, name in re.findall(rf"def {PREFIX}([a-z])_(\w+)\(", path.read_text()):
            found[letter.upper()].add(name)
    return found


def table() -> dict[str, tuple[set[str], set[str]]]:
    """(simulated, real) by letter, as the README has them."""
    rows = re.findall(r"^\| ([A-Z]) \|[^|]*\|([^|]*)\|([^|]*)\|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {letter: (set(re.findall(r"`(\w+)`", sim)), set(re.findall(r"`(\w+)`", real))) for letter, sim, real in rows}


@pytest.mark.parametrize("letter", LETTERS)
def test_the_table_names_exactly_the_tests_of_a_scenario(letter: str) -> None:
    simulated = named_in(sorted(FOLDER.glob("test_scenarios_*.py")))[letter]
    real = named_in(sorted((FOLDER.parent / "runtime").glob("test_failures_*.py")))[letter]
    assert table()[letter] == (simulated, real)
    assert simulated
    assert real or letter not in REAL


def test_the_table_has_every_scenario_and_no_other() -> None:
    assert list(table()) == list(LETTERS)
