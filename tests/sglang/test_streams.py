"""The same random requests on every rank, while each rank has faults of its own: 300 steps, many seeds."""

from typing import Any

import pytest

from tests.sglang.engine import KVCOORD, STOCK, Engine
from tests.sglang.fleet import ALL, HOST, NONE, SEEDS, check, part, play
from tests.sglang.stream import Faults

SHAPES = [
    pytest.param({"tp": 2}, id="tp2"),
    pytest.param({"tp": 4}, id="tp4"),
    pytest.param({"tp": 1, "pp": 2}, id="pp2"),
    pytest.param({"tp": 2, "pp": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_with_faults_of_their_own_take_the_same_decisions(shape: dict[str, Any], seed: int) -> None:
    check(play(seed, KVCOORD, ALL, unequal=30, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_without_faults_take_the_same_decisions(shape: dict[str, Any], seed: int) -> None:
    check(play(seed, KVCOORD, NONE, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_every_write_policy_takes_the_same_decisions(policy: str, shape: dict[str, Any], seed: int) -> None:
    """Write-back counts on what all ranks have promised, so its noise takes what is not promised."""
    faults = Faults(host_noise=100, device_noise=60, copy_steps=6, keeps_promises=policy == "write_back")
    check(play(seed, KVCOORD, faults, unequal=30, write_policy=policy, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pages_of_many_tokens_and_the_tree_in_python_take_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, unequal=32, page_size=4, tree_core="python"))


def test_stock_ranks_with_noise_in_their_host_pools_still_part() -> None:
    assert part(Engine, HOST) >= 2


def test_stock_ranks_without_faults_stay_together() -> None:
    check(play(0, STOCK, NONE))
