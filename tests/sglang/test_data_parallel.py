"""Data-parallel attention: every attention group serves requests of its own, and is a group of its own to kvcoord."""

import tempfile
from typing import Any

import pytest
import torch.distributed as dist

from tests.sglang.engine import Engine, Groups
from tests.sglang.fleet import SEEDS, STEPS, check
from tests.sglang.stream import Faults, Stream
from tests.sglang.test_coordinator_killed import coordinator
from tests.sglang.world import run_ranks, values

FAULTS = Faults(host_noise=160, copy_steps=4)


def play(seed: int, settings: dict[str, str]) -> list[Any]:
    """Two attention groups of two ranks. Each rank tells its group's name, and how the stream of its group went."""

    def on_rank(groups: Groups) -> Any:
        pairs = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
        replica = groups.rank // 2
        engine = Engine(
            groups,
            attention_groups=(pairs[replica], None),
            data_parallel=2,
            host_slots=448 - 30 * groups.rank,
        )
        # The second replica has fewer requests, so the two are at different steps all the time.
        report = Stream(engine, seed + 100 * replica, groups.rank, FAULTS).play(STEPS // (1 + replica))
        name = engine.cache.agreement.rounds._member.config.group.name
        engine.close()
        return name, report

    return values(run_ranks(on_rank, tp=4, environment=settings))


def check_replicas(told: list[Any]) -> None:
    assert [name for name, _ in told] == ["sglang-dp0", "sglang-dp0", "sglang-dp1", "sglang-dp1"]
    first, second = [[report for _, report in told[at : at + 2]] for at in (0, 2)]
    check(first)
    check(second)
    assert len(first[0].steps) == STEPS
    assert second[0].steps != first[0].steps[: len(second[0].steps)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_attention_group_takes_its_own_decisions_alike(seed: int) -> None:
    check_replicas(play(seed, {}))


def test_two_attention_groups_share_a_coordinator_without_meeting() -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/a.sock"
        with coordinator(address):
            check_replicas(play(0, {"KVCOORD_COORDINATORS": address}))
