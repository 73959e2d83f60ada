"""The list of SGLang's tests names tests of ours that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_of_ours_that_the_list_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "sglang-tests.md").read_text())
    assert len(named) > 30
    for file, name in set(named):
        tree = ast.parse((ROOT / "tests" / "sglang" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
