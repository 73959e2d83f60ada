"""The house rules that a reader relies on: imports point down, light processes stay light, files stay short."""

import ast
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest
from importlinter import api as import_linter

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "kvcoord"

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

LIGHT_MODULES = {
    "kvcoord": ("torch", "numpy", "zmq"),
    "kvcoord.config": ("torch", "numpy", "zmq"),
    "kvcoord.runtime.coordinator": ("torch", "numpy"),
    "kvcoord.cli.coordinator": ("torch", "numpy"),
}
"""Modules whose import must not load the named packages."""


def python_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or exists(parent)) and find_spec(module) is not None


def light_modules() -> list[str]:
    return [module for module in LIGHT_MODULES if exists(module)]


def test_imports_follow_the_contracts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    passed = import_linter.lint_imports(config_filename="pyproject.toml", cache_dir=None)
    assert passed, capsys.readouterr().out
