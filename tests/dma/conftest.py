from collections.abc import Iterator

import pytest

from tests.dma.gate import Gate, stand_in
from tests.dma.pools import Pools


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """In place of what moves the CPU engine's pieces: its threads move nothing until they are let."""
    gate = Gate(pieces_free=0)
    stand_in(monkeypatch, gate)
    return gate
