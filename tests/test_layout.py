"""The house rules that a reader relies on: imports point down, light processes stay light, files stay short."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "kvcoord"
PYTHON_FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((REPOSITORY / "tests").rglob("*.py"))]

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
VAGUE_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "base", "misc"}
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")))

HEAVY = ("torch", "numpy")
LIGHT_MODULES = {
    "kvcoord": (*HEAVY, "zmq"),
    "kvcoord.config": (*HEAVY, "zmq"),
    "kvcoord.runtime.coordinator": HEAVY,
    "kvcoord.cli.coordinator": HEAVY,
}
"""What importing a module must not load."""


def exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or exists(parent)) and find_spec(module) is not None


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run(['--no-logo', '--no-cache'])"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_imports_follow_the_contracts() -> None:
    finished = lint_imports(REPOSITORY)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("errors.py", "import kvcoord.config", "Imports only point down"),
        ("memory/slots.py", "import time", "Machines, slots and index are pure"),
        ("observability/__init__.py", "import zmq", "Only transport imports zmq"),
        ("observability/__init__.py", "import torch", "Few modules may import torch"),
    ],
)
def test_a_contract_notices_an_import_against_it(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kvcoord", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    path = tmp_path / "kvcoord" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    finished = lint_imports(tmp_path)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert re.findall(r"^(.*) BROKEN\b", finished.stdout, re.MULTILINE) == [contract]


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_nothing_heavy(module: str) -> None:
    if not exists(module):
        pytest.skip(f"{module} does not exist")
    code = f"import sys, {module}; print(*sorted(sys.modules), sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    loaded = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split()
    assert module in loaded
    assert [name for name in LIGHT_MODULES[module] if name in loaded] == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_reaches_nothing_heavy_by_a_later_import_either(module: str) -> None:
    if not exists(module):
        pytest.skip(f"{module} does not exist")
    graph = grimp.build_graph("kvcoord", include_external_packages=True, cache_dir=None)
    for heavy in HEAVY:
        if heavy in graph.modules:
            assert graph.find_shortest_chain(importer=module, imported=heavy) is None


def test_files_are_short() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in PYTHON_FILES}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{relative(path)}:{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path in PYTHON_FILES
        for function in functions(path)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX} == {}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in PYTHON_FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_names_of_modules_and_folders_say_what_is_in_them() -> None:
    parts = {part for path in PYTHON_FILES for part in path.relative_to(REPOSITORY).with_suffix("").parts}
    assert parts & VAGUE_NAMES == set()


def test_every_module_says_what_it_does() -> None:
    silent = [
        relative(path) for path in sorted(PACKAGE.rglob("*.py")) if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_nothing_depends_on_the_hash_of_this_interpreter() -> None:
    calls = [
        f"{relative(path)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert calls == []


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run"])
def test_a_script_can_be_run(script: str) -> None:
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
