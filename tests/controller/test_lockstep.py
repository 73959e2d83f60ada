"""The cache logic of several ranks together, against the plain reference."""

import pytest

from kvcoord.index.keys import block_page_keys
from kvcoord.load.generate import PRESETS, generate
from kvcoord.load.reference import ReferenceCache
from tests.controller.cluster import Cluster


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("device", "host"), [(40, 90), (90, 40), (64, 64), (200, 30)])
def test_settled_requests_hit_exactly_what_the_reference_hits(ranks: int, device: int, host: int) -> None:
    cluster = Cluster(ranks, device, host)
    reference = ReferenceCache(device, host)
    for request in list(generate(PRESETS["conversation"], seed=3))[:120]:
        keys = block_page_keys(request.hash_ids)
        assert cluster.serve(keys) == reference.request(keys)
    cluster.check()
