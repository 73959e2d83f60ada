"""Which ranks agree with each other, and where the group's settings come from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from kvcoord.errors import ConfigError
from kvcoord.integrations.sglang.settings import read_settings
from kvcoord.integrations.sglang.support import group_suffix, lag_min
from kvcoord.integrations.sglang.topology import Topology, read_topology, share
from tests.sglang.engine import Engine, Groups
from tests.sglang.world import run_ranks, values

ALONE = Topology(0, 1, 1, 1)


def in_contexts(groups: Groups) -> Any:
    """SGLang's parameters of four ranks: two contexts of two tensor-parallel ranks."""
    rows = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    columns = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    return SimpleNamespace(
        tp_cache_group=groups.tp_group,
        attn_tp_cache_group=rows[groups.rank // 2],
        attn_cp_cache_group=columns[groups.rank % 2],
        pp_cache_group=None,
        pp_rank=0,
        pp_size=1,
    )


def test_context_parallel_ranks_are_numbered_context_by_context_and_hear_rank_0() -> None:
    def on_rank(groups: Groups) -> Any:
        parameters = in_contexts(groups)
        topology = read_topology(parameters)
        return topology, share(f"from {groups.rank}", parameters)

    told = values(run_ranks(on_rank, tp=4))
    assert [topology for topology, _ in told] == [Topology(rank, 2, 2, 1) for rank in range(4)]
    assert [text for _, text in told] == ["from 0"] * 4


def test_context_parallel_ranks_are_one_group() -> None:
    """Rank 3 has no room for the write, so none makes it."""

    def on_rank(groups: Groups) -> Any:
        parameters = in_contexts(groups)
        engine = Engine(
            groups,
            attention_groups=(parameters.attn_tp_cache_group, parameters.attn_cp_cache_group),
        )
        held = engine.host.alloc(engine.host.available_size()) if groups.rank == 3 else None
        engine.insert(range(64))
        engine.step(5)
        assert held is None or len(held)
        told = engine.cache.is_backuped(engine.match(range(64)).last_device_node), engine.cache.protected_size()
        engine.close()
        return told

    assert values(run_ranks(on_rank, tp=4)) == [(False, 0)] * 4


def test_pipeline_stages_come_after_each_other_and_hear_rank_0() -> None:
    def on_rank(groups: Groups) -> Any:
        parameters = SimpleNamespace(
            tp_cache_group=groups.tp_group,
            attn_tp_cache_group=None,
            attn_cp_cache_group=None,
            pp_cache_group=groups.pp_group,
            pp_rank=groups.pp_rank,
            pp_size=2,
        )
        return read_topology(parameters).rank, share(f"from {groups.rank}", parameters)

    assert values(run_ranks(on_rank, tp=2, pp=2)) == [(rank, "from 0") for rank in range(4)]


def test_the_lag_covers_how_far_pipeline_stages_run_apart() -> None:
    arguments = SimpleNamespace(pp_async_batch_depth=2)
    assert lag_min(arguments, ALONE) == 1
    assert lag_min(arguments, Topology(0, 1, 1, 4)) == 6


def test_every_data_parallel_scheduler_has_a_group_of_its_own() -> None:
    assert group_suffix(SimpleNamespace(attn_dp_rank=0, attn_dp_size=1)) == ""
    assert group_suffix(SimpleNamespace(attn_dp_rank=3, attn_dp_size=4)) == "-dp3"


def settings(environment: dict[str, str], topology: Topology = ALONE) -> Any:
    return read_settings(environment, topology, lag_min=topology.pp, suffix="")


def test_without_any_setting_the_coordinator_is_embedded() -> None:
    found = settings({})
    assert "coordinators" not in found.sources
    assert found.config.group.name == "sglang"


def test_the_environment_names_coordinators_and_group() -> None:
    found = settings({"KVCOORD_COORDINATORS": "ipc:///a,ipc:///b", "KVCOORD_GROUP": "prod"})
    assert "coordinators" in found.sources
    assert found.config.coordinators == ["ipc:///a", "ipc:///b"]
    assert found.config.group.name == "prod"


def test_a_file_sets_limits_and_the_lag(tmp_path: Path) -> None:
    file = tmp_path / "kvcoord.yaml"
    file.write_text("group: {name: mine, lag: 3}\ntimeouts: {round_timeout_s: 7}\n")
    config = settings({"KVCOORD_CONFIG": str(file)}, Topology(1, 2, 1, 2)).config
    assert (config.group.name, config.group.lag, config.timeouts.round_timeout_s) == ("mine", 3, 7)
    assert (config.rank, config.group.world_size, config.group.pp) == (1, 4, 2)


def test_a_lag_below_the_pipelines_depth_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvcoord.yaml"
    file.write_text("group: {lag: 1}\n")
    with pytest.raises(ConfigError, match="lag"):
        settings({"KVCOORD_CONFIG": str(file)}, Topology(0, 1, 1, 2))
