from collections.abc import Iterator

import pytest

from kvcoord.dma import cpu
from tests.dma.gate import Gate
from tests.dma.pools import Pools


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """In place of the CPU engine's memmove: its threads move nothing until they are let."""
    gate = Gate(pieces_free=0)
    monkeypatch.setattr(cpu, "memmove", gate)
    return gate
