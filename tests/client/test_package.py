"""What `import kvcoord` offers, and that it costs nothing until it is used."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcoord
from kvcoord.client.blocking import connect_blocking
from kvcoord.client.cache import connect
from kvcoord.domain import Aborted, Committed

PACKAGE = Path(kvcoord.__file__).parent


def test_the_package_offers_the_clients_and_their_outcomes() -> None:
    assert kvcoord.connect is connect
    assert kvcoord.connect_blocking is connect_blocking
    assert kvcoord.Committed is Committed
    assert kvcoord.Aborted is Aborted
    assert {"connect", "connect_blocking", "Committed", "Aborted", "__version__"} <= set(dir(kvcoord))


def test_a_name_that_does_not_exist_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="'kvcoord' has no attribute 'conect'"):
        kvcoord.conect  # type: ignore[attr-defined]  # noqa: B018


def test_the_types_of_the_package_name_all_that_it_loads_when_used() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    declared = {
        (alias.name, node.module) for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == set(vars(kvcoord)["_HOMES"].items())


def test_importing_the_package_loads_no_client_and_importing_the_client_nothing_heavy() -> None:
    code = "import sys, kvcoord; print('kvcoord.client' in sys.modules); kvcoord.connect_blocking;" + (
        "print(sorted({'torch', 'numpy', 'zmq', 'kvcoord.controller', 'kvcoord.runtime'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "False\n[]\n"
