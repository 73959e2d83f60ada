"""The storage tier: what one rank's store, pool or clock says is never acted on alone."""

import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.world import Result, agree, run_ranks, values

SEEDS = int(os.environ.get("STREAM_SEEDS", "2"))
"""Seeds of each random case. More of them are for a night, not for every change."""

PAGE = 16
TOKENS = list(range(1000, 1064))
STEPS_MAX = 400


@pytest.fixture(scope="session", autouse=True)
def _hash_extension_is_built() -> None:
    """SGLang compiles it at first use, which takes longer than a scenario may."""
    get_native_hash(array("q", TOKENS), None, PAGE)


class Stored:
    """An engine with a file store that holds the KV of TOKENS, and nothing of it on host or device."""

    def __init__(self, groups: Groups, folder: str, backend: str | None, policy: str) -> None:
        options = '{"prefetch_threshold": 16, "prefetch_timeout_base": 0.05, "prefetch_timeout_per_ki_token": 0}'
        self.engine = Engine(
            groups,
            backend=backend,
            page_size=PAGE,
            storage="file",
            storage_options=options,
            prefetch_policy=policy,
            file_storage_path=folder,
        )
        self.cache = self.engine.cache
        self.handle = CacheRequestHandle("request", 0)
        self.engine.insert(TOKENS)
        self._settle()
        self.engine.evict(64)
        self.cache.evict_host(self.engine.host.size)

    def _keys(self) -> Any:
        return get_native_hash(array("q", TOKENS), None, PAGE)

    def _settle(self) -> None:
        """Steps until the write and the backup are over, which all ranks see at the same step."""
        for step in range(STEPS_MAX):
            self.engine.step()
            time.sleep(0.002)
            if step >= 20 and not self.cache.ongoing_backup and not self.cache.ongoing_write_through:
                return
        raise AssertionError("not backed up")

    def prefetch(self) -> None:
        match = self.engine.match(TOKENS)
        self.cache.prefetch_from_storage(
            self.handle, match.last_device_node, array("q", TOKENS), matched_prefix_tokens=[]
        )

    def progress(self) -> int:
        """Steps until the scheduler's poll says that the request may run."""
        for step in range(STEPS_MAX):
            self.engine.step()
            time.sleep(0.002)
            if self.cache.check_prefetch_progress(self.handle):
                return step
        return -1

    def end(self) -> dict[str, Any]:
        self.engine.step(6)
        self.cache.sanity_check()
        return {
            "hit": self.engine.match(TOKENS).host_hit_length,
            "prefetching": len(self.cache.ongoing_prefetch),
            "host_used": self.engine.host.size - self.engine.host.available_size(),
            "locked": self.cache.protected_size(),
        }


def play(
    scenario: Callable[[Stored, int], Any], backend: str | None, policy: str, *, tp: int = 2, pp: int = 1
) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(groups: Groups) -> Any:
            stored = Stored(groups, folder, backend, policy)
            told = scenario(stored, groups.rank)
            stored.engine.close()
            return told

        return run_ranks(on_rank, limit_s=12.0 if backend is STOCK else 40.0, tp=tp, pp=pp)


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
    policy: str, shape: dict[str, int]
) -> None:
    first, second = values(play(fetched, KVCOORD, policy, **shape))
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
    last = stored._keys()[-1]
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


def aborted_while_it_is_fetched(stored: Stored, _: int) -> Any:
    for attempt in range(8):
        stored.handle = CacheRequestHandle("request", attempt)
        stored.prefetch()
        stored.engine.step(attempt)
        stored.cache.release_aborted_request(stored.handle)
    for _ in range(30):
        stored.engine.step()
        time.sleep(0.002)
    return stored.end()


def test_requests_aborted_while_their_pages_are_fetched_leave_nothing_behind() -> None:
    first, second = values(play(aborted_while_it_is_fetched, KVCOORD, "wait_complete"))
    assert first == second
    assert (first["prefetching"], first["locked"]) == (0, 0)
    assert first["host_used"] == first["hit"]


def random_requests(stored: Stored, rank: int, seed: int) -> Any:
    """The same requests on every rank; each rank's store loses and refuses pages of its own."""
    shared, own = random.Random(f"requests {seed}"), random.Random(f"store {seed} {rank}")
    _fail_at_times(stored, own)
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
    for _ in range(60):
        stored.engine.step()
        time.sleep(0.002)
    return seen, stored.end()


def _fail_at_times(stored: Stored, rng: random.Random) -> None:
    controller = stored.engine.controller
    exists, get = controller.storage_backend.batch_exists, controller.page_get_func
    controller.storage_backend.batch_exists = lambda *asked: max(0, exists(*asked) - rng.choice((0, 0, 1)))

    def get_or_fail(operation: Any, hashes: Any, *rest: Any) -> Any:
        if rng.random() < 0.2:
            raise OSError("the store does not answer")
        return max(0, get(operation, hashes, *rest) - rng.choice((0, 0, 1)))

    controller.page_get_func = get_or_fail


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_random_requests_over_stores_that_fail_on_single_ranks_end_alike_and_leak_nothing(
    policy: str, seed: int
) -> None:
    first, second = values(play(partial(random_requests, seed=seed), KVCOORD, policy))
    assert first == second
    assert (first[1]["prefetching"], first[1]["locked"]) == (0, 0)
    assert first[1]["host_used"] == first[1]["hit"]
