"""Where a worker of these tests is."""

from pathlib import Path

import pytest


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/rank1.sock"
