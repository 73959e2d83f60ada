"""Random requests over host, device and storage, the same on every rank, while each rank has faults of its own."""

import tempfile
from typing import Any

import pytest

from tests.sglang.engine import Engine, Groups
from tests.sglang.fleet import SEEDS, STEPS, check
from tests.sglang.storage_stream import StorageStream
from tests.sglang.stored import OPTIONS, PAGE
from tests.sglang.stream import Faults
from tests.sglang.world import run_ranks, values

FAULTS = Faults(host_noise=100, copy_steps=4, keeps_promises=True)
"""A hit takes host slots at once, so the noise takes only those that are not promised."""


def play(seed: int, policy: str, shape: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(groups: Groups) -> Any:
            engine = Engine(
                groups,
                page_size=PAGE,
                device_slots=256,
                host_slots=448 - 32 * groups.rank,
                storage="file",
                storage_options=OPTIONS,
                prefetch_policy=policy,
                file_storage_path=folder,
            )
            stream = StorageStream(engine, seed, groups.rank, FAULTS)
            stream.fail_at_times()
            report = stream.play(STEPS)
            engine.close()
            return report, stream.fetched

        return values(run_ranks(on_rank, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
@pytest.mark.parametrize("shape", [{"tp": 2}, {"tp": 4}, {"tp": 1, "pp": 2}], ids=["tp2", "tp4", "pp2"])
def test_ranks_whose_stores_fail_take_the_same_decisions_and_leak_nothing(
    shape: dict[str, Any], policy: str, seed: int
) -> None:
    told = play(seed, policy, shape)
    check([report for report, _ in told])
    assert len({fetched for _, fetched in told}) == 1
