"""The same random requests on every rank, while each rank has faults of its own: 300 steps, many seeds."""

import os
from typing import Any

import pytest

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.stream import Faults, Report, Stream
from tests.sglang.world import run_ranks, values

STEPS = 300
SEEDS = int(os.environ.get("STREAM_SEEDS", "3"))
"""Seeds of each case. More of them are for a night, not for every change."""

NONE = Faults()
HOST = Faults(host_noise=160)
ALL = Faults(host_noise=160, device_noise=60, copy_steps=6)


def play(
    seed: int, backend: str | None, faults: Faults, *, tp: int = 2, pp: int = 1, unequal: int = 0, **options: Any
) -> list[Report]:
    """One stream. `unequal`: so many host slots fewer for each rank after the first."""

    def on_rank(groups: Groups) -> Report:
        first = groups.rank == 0
        own = Faults(faults.host_noise, 0 if first else faults.device_noise, faults.copy_steps, faults.keeps_promises)
        engine = Engine(
            groups,
            backend=backend,
            device_slots=256 + own.device_noise,
            host_slots=448 - unequal * groups.rank,
            **options,
        )
        report = Stream(engine, seed, groups.rank, own).play(STEPS)
        engine.close()
        return report

    results = run_ranks(on_rank, tp=tp, pp=pp, limit_s=50.0)
    if backend is STOCK:
        return [result.value for result in results if result.ok]
    reports: list[Report] = values(results)
    return reports


def check(reports: list[Report]) -> None:
    for report in reports:
        assert report.steps == reports[0].steps
        assert report.wrong_bytes == 0
        assert report.leaks == []
    assert reports[0].loads > 0


SHAPES = [
    pytest.param({"tp": 2}, id="tp2"),
    pytest.param({"tp": 4}, id="tp4"),
    pytest.param({"tp": 1, "pp": 2}, id="pp2"),
    pytest.param({"tp": 2, "pp": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_with_faults_of_their_own_take_the_same_decisions(shape: dict[str, int], seed: int) -> None:
    check(play(seed, KVCOORD, ALL, unequal=30, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_without_faults_take_the_same_decisions(shape: dict[str, int], seed: int) -> None:
    check(play(seed, KVCOORD, NONE, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_every_write_policy_takes_the_same_decisions(policy: str, shape: dict[str, int], seed: int) -> None:
    """Write-back counts on what all ranks have promised, so its noise takes what is not promised."""
    faults = Faults(host_noise=100, device_noise=60, copy_steps=6, keeps_promises=policy == "write_back")
    check(play(seed, KVCOORD, faults, unequal=30, write_policy=policy, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pages_of_many_tokens_and_the_tree_in_python_take_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, unequal=32, page_size=4, tree_core="python"))


def test_stock_ranks_with_noise_in_their_host_pools_still_part() -> None:
    parted = 0
    for seed in range(3):
        reports = play(seed, STOCK, HOST)
        parted += len(reports) < 2 or reports[0].steps != reports[1].steps
    assert parted >= 2


def test_stock_ranks_without_faults_stay_together() -> None:
    check(play(0, STOCK, NONE))
