"""The storage tier: what one rank's store, pool or clock says is never acted on alone."""

import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.hybrid import DraftEngine, IndexerEngine
from tests.sglang.stored import OPTIONS, TOKENS, UNHURRIED, Stored, fail_at_times
from tests.sglang.world import Result, agree, run_ranks, values

SEEDS = int(os.environ.get("STREAM_SEEDS", "2"))
"""Seeds of each random case. More of them are for a night, not for every change."""


def play(
    scenario: Callable[[Stored, int], Any],
    backend: str | None,
    policy: str,
    *,
    model: type[Engine] = Engine,
    options: str = OPTIONS,
    tp: int = 2,
    pp: int = 1,
) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(groups: Groups) -> Any:
            stored = Stored(groups, folder, backend, policy, model, options)
            told = scenario(stored, groups.rank)
            stored.engine.close()
            return told

        return run_ranks(on_rank, limit_s=12.0 if backend is STOCK else 150.0, tp=tp, pp=pp)


def fetched(stored: Stored, _: int) -> Any:
    stored.prefetch()
    steps = stored.progress()
    stored.engine.wipe()
    loaded, node = stored.engine.load_back(stored.engine.match(TOKENS))
    stored.engine.step(3)
    return steps, loaded, stored.engine.holds(node, TOKENS), stored.end()


@pytest.mark.parametrize("shape", [{"tp": 2}, {"tp": 1, "pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_what_storage_holds_comes_back_on_every_rank_at_the_same_step_with_its_bytes(
    policy: str, shape: dict[str, Any]
) -> None:
    first, second = values(play(fetched, KVCOORD, policy, options=UNHURRIED, **shape))
    assert first == second
    assert first[1:3] == (64, True)
    assert first[3] == {"hit": 0, "prefetching": 0, "host_used": 64, "locked": 0}


def staged_where_it_fits(stored: Stored, rank: int) -> Any:
    """Rank 1 has room for half of the hit."""
    held = stored.engine.host.alloc(stored.engine.host.available_size() - 32) if rank == 1 else None
    stored.engine.step(3)
    stored.prefetch()
    stored.progress()
    if held is not None:
        stored.engine.host.free(held)
    return stored.end()


def test_stock_ranks_still_stage_what_each_has_room_for() -> None:
    assert not agree(play(staged_where_it_fits, STOCK, "wait_complete"))


def test_a_hit_is_staged_as_far_as_every_rank_has_room() -> None:
    first, second = values(play(staged_where_it_fits, KVCOORD, "wait_complete"))
    assert first == second == {"hit": 32, "prefetching": 0, "host_used": 32, "locked": 0}


def revoked_where_it_does_not_fit(stored: Stored, rank: int) -> Any:
    held = stored.engine.host.alloc(stored.engine.host.available_size()) if rank == 1 else None
    stored.engine.step(3)
    stored.prefetch()
    done = stored.progress() >= 0
    if held is not None:
        stored.engine.host.free(held)
    return done, stored.end()


def test_stock_ranks_still_part_when_one_has_no_room_for_a_hit() -> None:
    assert not agree(play(revoked_where_it_does_not_fit, STOCK, "wait_complete"))


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_a_hit_that_one_rank_has_no_room_for_is_revoked_on_all(policy: str) -> None:
    first, second = values(play(revoked_where_it_does_not_fit, KVCOORD, policy))
    assert first == second == (True, {"hit": 0, "prefetching": 0, "host_used": 0, "locked": 0})


def fewer_pages_on_one_rank(stored: Stored, rank: int) -> Any:
    """Rank 1's store has lost its last page."""
    if rank == 1:
        _forget_last_page(stored)
    stored.engine.step(3)
    stored.prefetch()
    stored.progress()
    return stored.end()


def _forget_last_page(stored: Stored) -> None:
    backend = stored.engine.controller.storage_backend
    last = stored.keys()[-1]
    exists = backend.batch_exists
    backend.batch_exists = lambda keys, extra=None: exists([key for key in keys if key != last], extra)


def test_the_prefix_that_every_ranks_store_has_is_used() -> None:
    first, second = values(play(fewer_pages_on_one_rank, KVCOORD, "wait_complete"))
    assert first == second
    assert first["hit"] == 48


def _late_and_empty(*_: Any) -> int:
    time.sleep(1.0)
    return 0


def a_store_that_never_answers_on_one_rank(stored: Stored, rank: int) -> Any:
    """Both clocks run out; the request is admitted on both ranks at the same step."""
    if rank == 1:
        stored.engine.controller.page_get_func = _late_and_empty
    stored.engine.step(3)
    stored.prefetch()
    return stored.progress(), stored.cache.pop_prefetch_loaded_tokens(stored.handle)


def test_a_deadline_is_over_when_it_is_over_by_every_ranks_clock() -> None:
    first, second = values(play(a_store_that_never_answers_on_one_rank, KVCOORD, "timeout"))
    assert first == second
    assert first[0] >= 0


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
@pytest.mark.parametrize("model", [DraftEngine, IndexerEngine])
def test_what_storage_holds_comes_back_with_the_bytes_of_a_side_pool(model: type[Engine], policy: str) -> None:
    first, second = values(play(fetched, KVCOORD, policy, model=model, options=UNHURRIED))
    assert first == second
    assert first[1:3] == (64, True)
    assert first[3] == {"hit": 0, "prefetching": 0, "host_used": 64, "locked": 0}


def aborted_while_it_is_fetched(stored: Stored, _: int) -> Any:
    for attempt in range(8):
        stored.handle = CacheRequestHandle("request", attempt)
        stored.prefetch()
        stored.engine.step(attempt)
        stored.cache.release_aborted_request(stored.handle)
    stored.rest()
    return stored.end()


def test_requests_aborted_while_their_pages_are_fetched_leave_nothing_behind() -> None:
    first, second = values(play(aborted_while_it_is_fetched, KVCOORD, "wait_complete"))
    assert first == second
    assert (first["prefetching"], first["locked"]) == (0, 0)
    assert first["host_used"] == first["hit"]


def random_requests(stored: Stored, rank: int, seed: int) -> Any:
    """The same requests on every rank; each rank's store loses and refuses pages of its own."""
    shared, own = random.Random(f"requests {seed}"), random.Random(f"store {seed} {rank}")
    fail_at_times(stored.engine, own)
    seen = []
    for attempt in range(20):
        stored.handle = CacheRequestHandle(f"request {attempt}", 0)
        stored.prefetch()
        if shared.random() < 0.3:
            stored.engine.step(shared.randrange(4))
            stored.cache.release_aborted_request(stored.handle)
        else:
            seen.append(stored.progress())
        match = stored.engine.match(TOKENS)
        seen.append(match.host_hit_length)
        if match.host_hit_length and shared.random() < 0.5:
            stored.engine.wipe()
            loaded, node = stored.engine.load_back(match)
            seen.append(loaded)
            assert stored.engine.holds(node, TOKENS)
            stored.engine.step(4)
        stored.engine.evict(64)
        if shared.random() < 0.7:
            stored.cache.evict_host(64)
    stored.rest()
    return seen, stored.end()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_random_requests_over_stores_that_fail_on_single_ranks_end_alike_and_leak_nothing(
    policy: str, seed: int
) -> None:
    first, second = values(play(partial(random_requests, seed=seed), KVCOORD, policy))
    assert first == second
    assert (first[1]["prefetching"], first[1]["locked"]) == (0, 0)
    assert first[1]["host_used"] == first[1]["hit"]
