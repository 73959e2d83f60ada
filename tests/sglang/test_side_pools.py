"""Pools that follow another's slots: an indexer's keys, a draft model's KV. One vote covers all of them."""

from typing import Any

import pytest

from tests.sglang.engine import KVCOORD, Engine, Groups
from tests.sglang.fleet import ALL, HOST, SEEDS, check, part, play
from tests.sglang.hybrid import DraftEngine, IndexerEngine, WindowDraftEngine
from tests.sglang.stream import Faults
from tests.sglang.world import run_ranks, values

TOKENS = list(range(1000, 1064))

MODELS = [
    pytest.param(DraftEngine, id="draft"),
    pytest.param(IndexerEngine, id="indexer"),
    pytest.param(WindowDraftEngine, id="draft-of-the-window"),
]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_loaded_back_is_right_in_the_side_pool_as_well(model: type[Engine]) -> None:
    def on_rank(groups: Groups) -> Any:
        engine = model(groups)
        engine.insert(TOKENS)
        engine.step(5)
        engine.evict(64)
        engine.wipe()
        loaded, node = engine.load_back(engine.match(TOKENS))
        engine.step(4)
        told = loaded, engine.holds(node, TOKENS), len(engine.host.entries) - len(engine.host_pools())
        engine.close()
        return told

    assert values(run_ranks(on_rank)) == [(64, True, 1)] * 2


@pytest.mark.parametrize("model", MODELS)
def test_a_write_that_one_rank_has_no_room_for_is_written_to_no_pool_of_any_rank(model: type[Engine]) -> None:
    def on_rank(groups: Groups) -> Any:
        engine = model(groups)
        held = engine.host.alloc(engine.host.available_size() - 32) if groups.rank == 1 else None
        engine.insert(TOKENS)
        engine.step(6)
        side = engine.host.entries[-1].host_pool
        told = engine.cache.is_backuped(engine.match(TOKENS).last_device_node), side.available_size() == side.size
        assert held is None or engine.host.free(held)
        engine.close()
        return told

    assert values(run_ranks(on_rank)) == [(False, True)] * 2


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("model", MODELS)
def test_ranks_with_faults_of_their_own_take_the_same_decisions(model: type[Engine], seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=model, unequal=30))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pipeline_stages_take_the_same_decisions(seed: int) -> None:
    check(play(seed, KVCOORD, ALL, model=DraftEngine, unequal=30, tp=1, pp=2))


@pytest.mark.parametrize("model", MODELS)
def test_write_back_takes_the_same_decisions(model: type[Engine]) -> None:
    faults = Faults(host_noise=100, device_noise=60, copy_steps=6, keeps_promises=True)
    check(play(0, KVCOORD, faults, model=model, unequal=30, write_policy="write_back"))


@pytest.mark.parametrize("model", MODELS)
def test_stock_ranks_with_noise_in_their_host_pools_still_part(model: type[Engine]) -> None:
    assert part(model, HOST) >= 2
