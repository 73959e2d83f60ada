"""Where SGLang's ranks decide alone, and part.

Each is played on the unmodified cache, which shows that the reproduction still reproduces, and on kvcoord's, on which
the ranks stay together. Rank 1 has less room than rank 0.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.world import Result, agree, run_ranks

FIRST = list(range(1000, 1064))
SECOND = list(range(2000, 2064))

Scenario = Callable[[Engine, Groups], Any]


def play(scenario: Scenario, backend: str | None, *, tp: int = 2, pp: int = 1, **options: Any) -> list[Result]:
    """The scenario on each rank of an engine with this backend."""

    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups, backend=backend, **options)
        told = scenario(engine, groups)
        engine.close()
        return told

    return run_ranks(on_rank, tp=tp, pp=pp, limit_s=15.0 if backend is STOCK else 150.0)


def hold_host(engine: Engine, groups: Groups, left: int) -> Any:
    """Something else takes rank 1's host slots but for `left`."""
    return engine.host.alloc(engine.host.available_size() - left) if groups.rank == 1 else None


def written_where_it_fits(engine: Engine, groups: Groups) -> Any:
    held = hold_host(engine, groups, 32)
    engine.insert(FIRST)
    engine.step(4)
    if held is not None:
        engine.host.free(held)
    engine.insert(SECOND)
    engine.step(6)
    return engine.evict(128), len(engine.cache.ongoing_write_through), engine.match(FIRST).host_hit_length


def loaded_where_it_fits(engine: Engine, groups: Groups) -> Any:
    engine.insert(FIRST)
    engine.step(6)
    engine.evict(64)
    held = engine.allocator.alloc(224) if groups.rank == 1 else None
    engine.step(3)
    loaded = engine.load_back(engine.match(FIRST))
    engine.step(6)
    assert held is None or len(held) == 224
    return loaded, len(engine.cache.ongoing_load_back), engine.cache.protected_size()


def demoted_where_it_fits(engine: Engine, groups: Groups) -> Any:
    hold_host(engine, groups, 32)
    engine.step(3)
    engine.insert(FIRST)
    engine.step(3)
    return engine.evict(64), engine.match(FIRST).host_hit_length


def staged_from_the_first_stage(engine: Engine, groups: Groups) -> Any:
    hold_host(engine, groups, 32)
    engine.insert(FIRST)
    engine.step(6)
    return engine.evict(64), len(engine.cache.ongoing_write_through)


SCENARIOS = [
    pytest.param(written_where_it_fits, {}, id="a write that fits on one rank only"),
    pytest.param(loaded_where_it_fits, {}, id="a load-back that fits on one rank only"),
    pytest.param(demoted_where_it_fits, {"write_policy": "write_back"}, id="a write-back that fits on one rank only"),
    pytest.param(staged_from_the_first_stage, {"tp": 1, "pp": 2}, id="a write that fits on one pipeline stage only"),
]


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_stock_ranks_still_part(scenario: Scenario, options: dict[str, Any]) -> None:
    assert not agree(play(scenario, STOCK, **options))


@pytest.mark.parametrize(("scenario", "options"), SCENARIOS)
def test_kvcoord_ranks_stay_together(scenario: Scenario, options: dict[str, Any]) -> None:
    results = play(scenario, KVCOORD, **options)
    assert agree(results), results


@pytest.mark.parametrize("core", ["rust", "python"])
def test_an_aborted_write_leaves_no_lock_and_the_next_one_commits_on_both_ranks(core: str) -> None:
    results = play(written_where_it_fits, KVCOORD, tree_core=core)
    assert agree(results), results
    assert results[0].value == (128, 0, 0)


def test_a_pool_that_shrinks_behind_the_groups_back_is_named_on_every_rank() -> None:
    """The device slots go without a frame between, so one rank loads and one cannot: told, and never lived with."""

    def scenario(engine: Engine, groups: Groups) -> None:
        engine.insert(FIRST)
        engine.step(6)
        engine.evict(64)
        held = engine.allocator.alloc(224) if groups.rank == 1 else None
        engine.load_back(engine.match(FIRST))
        engine.step(6)
        assert held is not None

    for result in play(scenario, KVCOORD):
        assert "Diverged" in result.error
        assert "load-back" in result.error
