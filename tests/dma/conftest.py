from collections.abc import Iterator

import pytest

from tests.dma.pools import Pools


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.device.close()
    pools.host.close()
