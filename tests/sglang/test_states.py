"""Models with recurrent layers: their states are counted, reserved, evicted and loaded back as all ranks have agreed.

Where stock ranks part is played on the unmodified cache as well, which shows that the reproduction still reproduces.
"""

import types
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams

from kvcoord.integrations.sglang.capacity import KV
from kvcoord.integrations.sglang.components import STATE
from tests.sglang.engine import KVCOORD, STOCK, Groups, key
from tests.sglang.fleet import ALL, HOST, NONE, SEEDS, check, part, play
from tests.sglang.scenes import FIRST, SECOND, Scene, give_back, hold_device, hold_host, host_free, on_ranks
from tests.sglang.states import StateEngine
from tests.sglang.stream import Faults
from tests.sglang.world import agree, run_ranks, values

# --- where stock ranks part -------------------------------------------------------------------------------------------


def written_where_it_fits(engine: StateEngine, groups: Groups) -> Any:
    held = hold_host(engine, groups, STATE, 0)
    engine.insert(FIRST)
    engine.step(5)
    give_back(engine, STATE, held)
    engine.insert(SECOND)
    engine.step(6)
    return engine.evict(128), len(engine.cache.ongoing_write_through), engine.match(FIRST).host_hit_length


def loaded_where_it_fits(engine: StateEngine, groups: Groups) -> Any:
    """Rank 1 has a state for the request, and none for the tree."""
    engine.insert(FIRST)
    engine.step(6)
    engine.evict(64)
    held = hold_device(engine, groups, STATE, 1)
    engine.step(3)
    loaded = engine.load_back(engine.match(FIRST))
    engine.step(6)
    assert held is None or len(held)
    return loaded, len(engine.cache.ongoing_load_back), engine.sizes()


def demoted_where_it_fits(engine: StateEngine, groups: Groups) -> Any:
    hold_host(engine, groups, STATE, 0)
    engine.step(3)
    engine.insert(FIRST)
    engine.step(3)
    return engine.evict(64), engine.match(FIRST).host_hit_length


def backed_up_where_room_is_short(engine: StateEngine, groups: Groups) -> Any:
    """The state of an inner node leaves the device. Only rank 1 lacks room to keep it on the host."""
    engine.insert(SECOND)
    engine.evict(64)
    hold_host(engine, groups, STATE, 0)
    engine.step(3)
    engine.insert(FIRST[:48])
    engine.insert(FIRST, 48)
    evicted = engine.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
    engine.step(6)
    return evicted.mamba_num_evicted, engine.match(SECOND).mamba_host_hit_length, engine.sizes()


def copied_where_room_is_short(engine: StateEngine, groups: Groups) -> Any:
    """A request copies a state that it has matched. Only rank 1 has to evict one for it."""
    engine.insert(SECOND)
    engine.insert(FIRST)
    engine.step(6)
    hold_device(engine, groups, STATE, 0)
    engine.step(3)
    kv = types.SimpleNamespace(holds_mamba=False, mamba_pool_idx=None)
    request = types.SimpleNamespace(session=None, kv=kv)
    engine.cache.match_prefix(MatchPrefixParams(key=key(FIRST), cow_mamba=True, req=request))
    engine.step(3)
    return engine.match(SECOND).device_prefix_len, engine.match(SECOND).mamba_host_hit_length, engine.sizes()


SCENARIOS = [
    pytest.param(written_where_it_fits, {}, id="a state that fits on the host of one rank only"),
    pytest.param(written_where_it_fits, {"pp": True}, id="a state that fits on the host of one stage only"),
    pytest.param(loaded_where_it_fits, {}, id="a state that fits on the device of one rank only"),
    pytest.param(demoted_where_it_fits, {"write_policy": "write_back"}, id="a state that one rank alone can demote"),
    pytest.param(
        backed_up_where_room_is_short, {"write_policy": "write_back"}, id="a state for which one rank makes room"
    ),
    pytest.param(copied_where_room_is_short, {}, id="a state that one rank evicts to copy another"),
]


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_stock_ranks_still_part(scenario: Scene, options: dict[str, Any]) -> None:
    assert not agree(on_ranks(StateEngine, scenario, STOCK, **options))


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_kvcoord_ranks_stay_together(scenario: Scene, options: dict[str, Any]) -> None:
    results = on_ranks(StateEngine, scenario, **options)
    assert agree(results), results


# --- what is written and loaded ---------------------------------------------------------------------------------------


def test_a_reservation_takes_slots_of_both_pools_and_changes_nothing_else() -> None:
    def scenario(engine: StateEngine, _: Groups) -> Any:
        before = host_free(engine)
        engine.insert(FIRST)
        engine.step()
        after = host_free(engine)
        on_host = engine.cache.is_backuped(engine.match(FIRST).last_device_node)
        return before[KV] - after[KV], before[STATE] - after[STATE], on_host

    assert values(on_ranks(StateEngine, scenario)) == [(64, 1, False)] * 2


def test_a_reservation_that_fails_in_one_pool_holds_nothing_and_evicts_nothing() -> None:
    """The state on the host could be evicted to make room; inside a reservation it is not."""

    def scenario(engine: StateEngine, groups: Groups) -> Any:
        engine.insert(SECOND)
        engine.step(6)
        engine.evict(64)
        hold_host(engine, groups, STATE, 0)
        before = host_free(engine)
        engine.insert(FIRST)
        engine.step()
        return before != host_free(engine), engine.match(SECOND).host_hit_length

    assert values(on_ranks(StateEngine, scenario)) == [(True, 64), (False, 64)]


def test_a_shortage_of_states_evicts_the_same_ones_on_both_ranks_and_commits() -> None:
    def scenario(engine: StateEngine, groups: Groups) -> Any:
        engine.insert(SECOND)
        engine.step(6)
        engine.evict(64)
        hold_host(engine, groups, STATE, 0)
        engine.insert(FIRST)
        engine.step(8)
        first = engine.cache.is_backuped(engine.match(FIRST).last_device_node)
        return first, engine.match(SECOND).mamba_host_hit_length, engine.locked()

    assert values(on_ranks(StateEngine, scenario)) == [(True, 0, 0)] * 2


def test_a_state_that_comes_to_a_node_on_the_host_is_written_alone() -> None:
    """The node was split off a longer one, so it has KV on the host, and no state yet."""

    def scenario(engine: StateEngine, _: Groups) -> Any:
        engine.insert(FIRST)
        engine.step(6)
        before = host_free(engine)
        engine.insert(FIRST[:48])
        engine.step(6)
        after = host_free(engine)
        engine.evict(64)
        engine.wipe()
        loaded, node = engine.load_back(engine.match(FIRST[:48]))
        engine.step(4)
        return before[KV] - after[KV], before[STATE] - after[STATE], loaded, engine.holds(node, FIRST), engine.locked()

    assert values(on_ranks(StateEngine, scenario)) == [(0, 1, 48, True, 0)] * 2


def test_a_loading_request_gets_a_copy_of_the_state_of_its_own() -> None:
    def scenario(engine: StateEngine, _: Groups) -> Any:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        engine.wipe()
        loaded, node = engine.load_back(engine.match(FIRST))
        engine.step(4)
        ((_node, request),) = engine._of_requests
        return loaded, engine.holds(node, FIRST), engine.holds_state(request.kv.mamba_pool_idx, FIRST)

    assert values(on_ranks(StateEngine, scenario)) == [(64, True, True)] * 2


def test_a_load_for_which_one_rank_has_no_state_at_all_is_made_by_none() -> None:
    """SGLang ends the process of a rank that has none for the request."""

    def scenario(engine: StateEngine, groups: Groups) -> Any:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        hold_device(engine, groups, STATE, 0)
        engine.step(3)
        loaded, _ = engine.load_back(engine.match(FIRST))
        return loaded, engine.match(FIRST).host_hit_length, engine.locked()

    assert values(on_ranks(StateEngine, scenario)) == [(0, 64, 0)] * 2


def test_states_that_are_taken_behind_the_groups_back_are_named_on_every_rank() -> None:
    def scenario(engine: StateEngine, groups: Groups) -> None:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        hold_device(engine, groups, STATE, 1)
        engine.load_back(engine.match(FIRST))
        engine.step(6)

    for result in on_ranks(StateEngine, scenario):
        assert "Diverged" in result.error
        assert "load-back" in result.error


# --- random streams ---------------------------------------------------------------------------------------------------

SHAPES = [
    pytest.param({"tp": 2}, id="tp2"),
    pytest.param({"tp": 1, "pp": 2}, id="pp2"),
    pytest.param({"tp": 2, "pp": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_with_faults_of_their_own_take_the_same_decisions(shape: dict[str, Any], seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=StateEngine, unequal=30, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_every_write_policy_takes_the_same_decisions(policy: str, shape: dict[str, Any], seed: int) -> None:
    faults = Faults(host_noise=100, device_noise=60, copy_steps=6, keeps_promises=policy == "write_back")
    check(play(seed, KVCOORD, faults, model=StateEngine, unequal=30, write_policy=policy, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_tree_in_python_takes_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=StateEngine, unequal=30, tree_core="python"))


def test_stock_ranks_with_noise_in_their_host_pools_still_part() -> None:
    assert part(StateEngine, HOST) >= 2


def test_stock_ranks_without_faults_stay_together() -> None:
    check(play(0, STOCK, NONE, model=StateEngine))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_storage_backend_is_refused_at_start() -> None:
    def at_start(groups: Groups) -> None:
        StateEngine(groups, storage="file")

    (refused,) = run_ranks(at_start, tp=1)
    assert "UsageError" in refused.error
    assert "--hicache-storage-backend" in refused.error
