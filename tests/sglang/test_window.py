"""Models with a sliding window: its slots are counted, reserved, evicted and loaded back as all ranks have agreed.

Where stock ranks part is played on the unmodified cache as well, which shows that the reproduction still reproduces.
"""

from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvcoord.integrations.sglang.capacity import KV
from kvcoord.integrations.sglang.components import WINDOW
from tests.sglang.engine import KVCOORD, STOCK, Groups
from tests.sglang.fleet import ALL, HOST, NONE, SEEDS, check, part, play
from tests.sglang.hybrid import WINDOW_TOKENS, WindowEngine
from tests.sglang.scenes import FIRST, SECOND, Scene, give_back, hold_device, hold_host, host_free, on_ranks
from tests.sglang.stream import Faults
from tests.sglang.test_retraction import TOKENS as RUNNING
from tests.sglang.test_retraction import request
from tests.sglang.world import agree, run_ranks, values

# --- where stock ranks part -------------------------------------------------------------------------------------------


def written_where_it_fits(engine: WindowEngine, groups: Groups) -> Any:
    held = hold_host(engine, groups, WINDOW, 8)
    engine.insert(FIRST)
    engine.step(5)
    give_back(engine, WINDOW, held)
    engine.insert(SECOND)
    engine.step(6)
    return engine.evict(128), len(engine.cache.ongoing_write_through), engine.match(FIRST).host_hit_length


def loaded_where_it_fits(engine: WindowEngine, groups: Groups) -> Any:
    engine.insert(FIRST)
    engine.step(6)
    engine.evict(64)
    held = hold_device(engine, groups, WINDOW, 8)
    engine.step(3)
    loaded = engine.load_back(engine.match(FIRST))
    engine.step(6)
    assert held is None or len(held)
    return loaded, len(engine.cache.ongoing_load_back), engine.sizes()


def demoted_where_it_fits(engine: WindowEngine, groups: Groups) -> Any:
    hold_host(engine, groups, WINDOW, 8)
    engine.step(3)
    engine.insert(FIRST)
    engine.step(3)
    return engine.evict(64), engine.match(FIRST).host_hit_length


def backed_up_where_room_is_short(engine: WindowEngine, groups: Groups) -> Any:
    """The window of an inner node leaves the device. Only rank 1 lacks room to keep it on the host, and not all of it.

    What could make room is in small nodes, so one rank alone would evict more of them than are needed.
    """
    engine.insert(SECOND)
    for split in (48, 56):
        engine.match(SECOND[:split] + FIRST[:8])
    engine.evict(64)
    hold_host(engine, groups, WINDOW, 8)
    engine.step(3)
    engine.insert(FIRST[:48])
    engine.match(FIRST[:48])
    engine.insert(FIRST, 48)
    evicted = engine.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=16))
    engine.step(6)
    return evicted.swa_num_tokens_evicted, engine.match(SECOND).swa_host_hit_length, engine.sizes()


SCENARIOS = [
    pytest.param(written_where_it_fits, {}, id="a window that fits on the host of one rank only"),
    pytest.param(written_where_it_fits, {"pp": True}, id="a window that fits on the host of one stage only"),
    pytest.param(loaded_where_it_fits, {}, id="a window that fits on the device of one rank only"),
    pytest.param(demoted_where_it_fits, {"write_policy": "write_back"}, id="a window that one rank alone can demote"),
    pytest.param(
        backed_up_where_room_is_short, {"write_policy": "write_back"}, id="a window for which one rank makes room"
    ),
]


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_stock_ranks_still_part(scenario: Scene, options: dict[str, Any]) -> None:
    assert not agree(on_ranks(WindowEngine, scenario, STOCK, **options))


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_kvcoord_ranks_stay_together(scenario: Scene, options: dict[str, Any]) -> None:
    results = on_ranks(WindowEngine, scenario, **options)
    assert agree(results), results


# --- what a write reserves --------------------------------------------------------------------------------------------


def test_a_reservation_takes_slots_of_both_pools_and_changes_nothing_else() -> None:
    def scenario(engine: WindowEngine, _: Groups) -> Any:
        before = host_free(engine)
        engine.insert(FIRST)
        engine.step()
        after = host_free(engine)
        return (
            before[KV] - after[KV],
            before[WINDOW] - after[WINDOW],
            engine.cache.is_backuped(engine.match(FIRST).last_device_node),
        )

    for kv, window, on_host in values(on_ranks(WindowEngine, scenario)):
        assert kv == 64
        assert WINDOW_TOKENS <= window <= 64
        assert not on_host


def test_a_reservation_that_fails_in_one_pool_holds_nothing_and_evicts_nothing() -> None:
    """The node on the host could be evicted to make room; inside a reservation it is not."""

    def scenario(engine: WindowEngine, groups: Groups) -> Any:
        engine.insert(SECOND)
        engine.step(6)
        engine.evict(64)
        held = hold_host(engine, groups, WINDOW, 0)
        before = host_free(engine)
        engine.insert(FIRST)
        engine.step()
        reserved = before != host_free(engine)
        return reserved, engine.match(SECOND).host_hit_length, held is None

    assert values(on_ranks(WindowEngine, scenario)) == [(True, 64, True), (False, 64, False)]


def test_a_shortage_of_window_slots_evicts_the_same_windows_on_both_ranks_and_commits() -> None:
    def scenario(engine: WindowEngine, groups: Groups) -> Any:
        engine.insert(SECOND)
        engine.step(6)
        engine.evict(64)
        hold_host(engine, groups, WINDOW, 0)
        engine.insert(FIRST)
        engine.step(8)
        first = engine.cache.is_backuped(engine.match(FIRST).last_device_node)
        return first, engine.match(SECOND).swa_host_hit_length, engine.locked()

    assert values(on_ranks(WindowEngine, scenario)) == [(True, 0, 0)] * 2


def test_a_window_that_is_computed_again_is_written_without_the_kv_that_the_host_still_has() -> None:
    def scenario(engine: WindowEngine, groups: Groups) -> Any:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        engine.cache.free_host(WINDOW, 1000)
        kv = host_free(engine)[KV]
        lost = engine.match(FIRST).host_hit_length
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        engine.wipe()
        loaded, node = engine.load_back(engine.match(FIRST))
        engine.step(4)
        return lost, loaded, engine.holds(node, FIRST), kv - host_free(engine)[KV], engine.locked()

    first, second = values(on_ranks(WindowEngine, scenario))
    assert first == second
    assert first == (0, 64, True, WINDOW_TOKENS, 0)


def test_a_node_that_is_split_while_its_window_is_written_is_committed_in_all_its_parts() -> None:
    def scenario(engine: WindowEngine, _: Groups) -> Any:
        engine.insert(FIRST)
        engine.match(FIRST[:16] + SECOND[:8])
        engine.step()
        engine.match(FIRST[:56] + SECOND[:8])
        engine.step(6)
        engine.evict(64)
        engine.wipe()
        loaded, node = engine.load_back(engine.match(FIRST))
        engine.step(3)
        return loaded, engine.holds(node, FIRST), engine.locked()

    assert values(on_ranks(WindowEngine, scenario)) == [(64, True, 0)] * 2


def test_a_load_makes_room_for_its_window_by_evicting_the_same_nodes_on_both_ranks() -> None:
    """Rank 1 alone is short of window slots; both evict."""

    def scenario(engine: WindowEngine, groups: Groups) -> Any:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        engine.insert(SECOND)
        engine.step(6)
        hold_device(engine, groups, WINDOW, 0)
        engine.step(3)
        loaded, node = engine.load_back(engine.match(FIRST))
        engine.step(4)
        return loaded, engine.holds(node, FIRST), engine.sizes()

    first, second = values(on_ranks(WindowEngine, scenario))
    assert first == second
    assert first[:2] == (64, True)


def test_a_window_that_shrinks_behind_the_groups_back_is_named_on_every_rank() -> None:
    def scenario(engine: WindowEngine, groups: Groups) -> None:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        hold_device(engine, groups, WINDOW, 8)
        engine.load_back(engine.match(FIRST))
        engine.step(6)

    for result in on_ranks(WindowEngine, scenario):
        assert "Diverged" in result.error
        assert "load-back" in result.error


@pytest.mark.parametrize(("left", "kept"), [(64, True), (16, False)])
def test_a_retracted_request_is_kept_with_its_window_on_every_rank_or_on_none(left: int, kept: bool) -> None:
    def scenario(engine: WindowEngine, groups: Groups) -> Any:
        running = request(engine)
        hold_host(engine, groups, WINDOW, left)
        engine.step(3)
        backup = engine.cache.backup_kv_cache(running)
        if backup is None:
            return False, True
        engine.wipe()
        engine.cache.restore_kv_cache(running, backup)
        rows = engine.requests.req_to_token[0, : len(RUNNING)].long()
        in_window = engine.allocator.translate_loc_from_full_to_swa(rows[-WINDOW_TOKENS:])
        right = all(layer.holds(rows, RUNNING) for layer in engine.layers())
        right &= all(layer.holds(in_window, RUNNING[-WINDOW_TOKENS:]) for layer in engine.window_layers())
        return True, right

    assert values(on_ranks(WindowEngine, scenario)) == [(kept, True)] * 2


def test_a_reset_forgets_what_is_open_in_both_pools() -> None:
    def scenario(engine: WindowEngine, _: Groups) -> Any:
        engine.insert(FIRST)
        engine.step()
        engine.cache.reset()
        engine.allocator.clear()
        engine.step(3)
        empty = host_free(engine) == {pool: host.size for pool, host in engine.host_pools().items()}
        engine.insert(FIRST)
        engine.step(6)
        return empty, engine.cache.is_backuped(engine.match(FIRST).last_device_node), engine.locked()

    assert values(on_ranks(WindowEngine, scenario)) == [(True, True, 0)] * 2


# --- random streams ---------------------------------------------------------------------------------------------------

SHAPES = [
    pytest.param({"tp": 2}, id="tp2"),
    pytest.param({"tp": 1, "pp": 2}, id="pp2"),
    pytest.param({"tp": 2, "pp": 2}, id="tp2-pp2"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_with_faults_of_their_own_take_the_same_decisions(shape: dict[str, Any], seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=WindowEngine, unequal=30, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_every_write_policy_takes_the_same_decisions(policy: str, shape: dict[str, Any], seed: int) -> None:
    faults = Faults(host_noise=100, device_noise=60, copy_steps=6, keeps_promises=policy == "write_back")
    check(play(seed, KVCOORD, faults, model=WindowEngine, unequal=30, write_policy=policy, **shape))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pages_of_many_tokens_take_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=WindowEngine, unequal=32, page_size=4))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_tree_in_python_takes_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=WindowEngine, unequal=30, tree_core="python"))


def test_stock_ranks_with_noise_in_their_host_pools_still_part() -> None:
    assert part(WindowEngine, HOST) >= 2


def test_stock_ranks_without_faults_stay_together() -> None:
    check(play(0, STOCK, NONE, model=WindowEngine))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_storage_backend_is_refused_at_start_and_at_run_time() -> None:
    def at_start(groups: Groups) -> None:
        WindowEngine(groups, storage="file")

    def at_run_time(groups: Groups) -> Any:
        engine = WindowEngine(groups)
        told = engine.cache.attach_storage_backend("file")
        engine.close()
        return told

    (refused,) = run_ranks(at_start, tp=1)
    assert "UsageError" in refused.error
    assert "--hicache-storage-backend" in refused.error
    ((done, said),) = values(run_ranks(at_run_time, tp=1))
    assert not done
    assert "storage" in said
