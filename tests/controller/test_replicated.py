"""Ranks that hold the same bytes and keep each host page once: who copies, when slots go back, what a restart costs."""

import random
from typing import Any

import pytest

from kvcoord.controller.effects import StartCopy
from kvcoord.domain import PageKey, Reason, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.load.reference import ReferenceCache
from kvcoord.memory.shares import Shares
from kvcoord.protocol.local import Acquire, Acquired, Advance, Evict, Evicted, Failed, Release, WriteThrough, join_keys
from tests.controller.test_kept import Lives

PATHS = [block_page_keys([100 * path + page for page in range(3)]) for path in range(8)]


def group(ranks: int = 4, host: int = 12, device: int = 60, **options: Any) -> Lives:
    """`host` pages in the memory of each rank."""
    return Lives(ranks, device, host, kv_replicas=options.pop("kv_replicas", ranks), **options)


def write(lives: Lives, keys: list[PageKey]) -> list[StartCopy | None]:
    """Begins to write a path through. What each rank copies, none of which ends."""
    lives.held = set(range(len(lives.workers)))
    (acquired, *_), *_ = lives.ask(Acquire(join_keys(keys)))
    assert isinstance(acquired, Acquired)
    lives.ask(WriteThrough(lease=acquired.lease, deferred=True), Release(acquired.lease))
    return [copies[0] if copies else None for copies in lives.copies]


def keepers(lives: Lives) -> list[int]:
    """Which rank of the first set keeps each path, -1 where it is not on the host."""
    found = []
    for keys in PATHS:
        tree = lives.workers[0].cache.state.tree
        if [(0, len(keys))] != tree.resident(keys, Tier.HOST):
            found.append(-1)
            continue
        pin = tree.pin(keys, 0, len(keys), Tier.HOST)
        (share,) = {slot // lives.configs[0].host_pages for slot in pin.slots[0]}
        tree.unpin(pin)
        found.append(share)
    return found


def host_books(lives: Lives) -> list[tuple[int, ...]]:
    pools = [worker.cache.state.pools.host[0] for worker in lives.workers]
    return [(pool.free_count, pool.reserved_count, pool.used_count, pool.quarantined_count) for pool in pools]


def test_only_the_keeper_of_its_pages_copies_and_its_ack_is_enough() -> None:
    lives = group()
    lives.advance()
    copies = write(lives, PATHS[0])
    assert [copy is not None for copy in copies] == [True, False, False, False]
    lives.copy_ended(0)
    lives.settle()
    assert keepers(lives)[0] == 0
    lives.check()


def test_an_operation_retires_when_its_own_participants_have_copied() -> None:
    """A write that two of four ranks keep: the other two have no part in it, and are told its end all the same."""
    lives = group(host=2)
    lives.advance()
    copies = write(lives, PATHS[0])
    assert [copy is not None for copy in copies] == [True, True, False, False]
    operations = [worker.cache.state.operations[copies[0].operation] for worker in lives.workers if copies[0]]
    assert [op.participants for op in operations] == [0b0011] * 4
    lives.copy_ended(0)
    assert [lives.advance().operations_open for _ in range(3)] == [1, 1, 1]
    lives.copy_ended(1)
    lives.settle()
    assert [worker.cache.state.tree.pages(Tier.HOST) for worker in lives.workers] == [3] * 4
    lives.check()


def test_stages_and_sets_have_a_keeper_each() -> None:
    lives = group(8, tp=4, pp=2, kv_replicas=2)
    lives.advance()
    copies = write(lives, PATHS[0])
    assert [copy is not None for copy in copies] == [True, False] * 4
    for rank in range(0, 8, 2):
        lives.copy_ended(rank)
    lives.settle()
    lives.check()


def test_the_slots_of_a_failed_write_are_free_when_the_copies_of_all_ranks_are_over_and_on_all_at_once() -> None:
    lives = group(host=2)
    lives.advance()
    write(lives, PATHS[0])
    lives.copy_ended(0, Reason.COPY_FAILED)
    for _ in range(3):
        lives.advance()
    assert host_books(lives) == [(5, 0, 0, 3)] * 4
    lives.copy_ended(1)
    lives.settle()
    assert host_books(lives) == [(8, 0, 0, 0)] * 4
    lives.held.clear()
    for keys in PATHS:
        lives.serve(keys)
    lives.check()


def test_a_page_that_one_rank_still_reads_stays_with_its_keeper() -> None:
    lives = group()
    lives.serve(PATHS[0])
    lives.ask(Evict(Tier.DEVICE, 60))
    lives.held = {3}
    acquired = lives.begin_on_all(Acquire(join_keys(PATHS[0]), landed=False))
    assert all(isinstance(answer, Acquired) and answer.host_pages == 3 for answer in acquired)
    for _ in range(3):
        lives.advance()
    assert lives.ask(Evict(Tier.HOST, 60)) == [[Evicted(0)]] * 4
    lives.copy_ended(3)
    lives.held.clear()
    lives.advance()
    lives.settle()
    assert lives.ask(Evict(Tier.HOST, 60)) == [[Evicted(3)]] * 4


def test_a_path_is_kept_by_one_rank_and_paths_by_all_of_them() -> None:
    lives = group()
    for keys in PATHS:
        lives.serve(keys[:2])
    for keys in PATHS:
        lives.serve(keys)
    assert sorted(keepers(lives)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_hits_are_those_of_one_pool_as_large_as_all_shares_together() -> None:
    lives, reference, rng = group(device=10, host=6), ReferenceCache(10, 24), random.Random(4)
    for _ in range(150):
        keys = rng.choice(PATHS)[: rng.randint(1, 3)]
        assert lives.serve(keys) == reference.request(keys)
        lives.check()
    slots = {tuple(worker.cache.state.pools.host[0]._owners) for worker in lives.workers}
    assert len(slots) == 1


@pytest.mark.parametrize("policy", ["write-back", "write-through-selective"])
def test_other_policies_keep_pages_once_as_well(policy: str) -> None:
    lives, rng = group(device=10, host=6, write_policy=policy), random.Random(5)
    for _ in range(150):
        lives.serve(rng.choice(PATHS)[: rng.randint(1, 3)])
        lives.check()
    assert lives.workers[0].cache.state.tree.pages(Tier.HOST) > 0


def test_with_a_rank_that_lost_its_memory_only_what_it_kept_is_lost() -> None:
    lives = group()
    for keys in PATHS:
        lives.serve(keys)
    before = keepers(lives)
    lives.restart(2)
    lives.run()
    lives.step = 0
    lives.register("m")
    lives.advance()
    assert keepers(lives) == [-1 if keeper == 2 else keeper for keeper in before]
    for keys, keeper in zip(PATHS, before, strict=True):
        assert lives.matched(keys) == [(0, 0 if keeper == 2 else 3)] * 4
    for keys in PATHS:
        lives.serve(keys)
    lives.check()


def test_what_lies_below_a_lost_page_is_dropped_since_no_lookup_can_reach_it() -> None:
    lives = group(2, host=4)
    long = block_page_keys(range(7))
    lives.serve(long)
    lives.restart(0)
    lives.run()
    lives.step = 0
    lives.register("m")
    lives.advance()
    assert lives.matched(long) == [(0, 0)] * 2
    assert host_books(lives) == [(8, 0, 0, 0)] * 2


def test_pages_outlive_the_engines_of_one_model_and_no_other() -> None:
    lives = group()
    for keys in PATHS:
        lives.serve(keys)
    before = keepers(lives)
    lives.next_life(lives.bequests())
    lives.advance()
    assert keepers(lives) == before
    lives.next_life(lives.bequests(), model="another")
    lives.advance()
    assert keepers(lives) == [-1] * 8
    assert host_books(lives) == [(48, 0, 0, 0)] * 4
    lives.check()


def test_a_newcomer_drops_the_pages_of_another_model_like_those_that_kept_them() -> None:
    lives = group()
    for keys in PATHS:
        lives.serve(keys)
    lives.restart(1)
    lives.run()
    lives.step = 0
    lives.register("another")
    lives.advance()
    assert keepers(lives) == [-1] * 8
    lives.serve(PATHS[0])
    lives.check()


def test_many_pages_are_told_in_portions() -> None:
    lives = group(host=12, limits={"pages_per_operation_max": 4})
    for keys in PATHS:
        lives.serve(keys)
    before = keepers(lives)
    lives.next_life(lives.bequests())
    lives.advance()
    assert keepers(lives) == before
    lives.check()


def test_a_vote_that_was_aborted_is_put_again() -> None:
    """The group is suspended while one rank has not said what it keeps."""
    lives = group(2)
    for keys in PATHS[:4]:
        lives.serve(keys)
    before = keepers(lives)
    pages = lives.bequests()
    lives.unheard = {1}
    lives.next_life(pages)
    assert [worker.host.settled for worker in lives.workers] == [False, False]
    lives.unheard.clear()
    lives.pass_time(lives.configs[0].timeouts.heartbeat_interval_s * 2)
    lives.run()
    lives.advance()
    assert keepers(lives) == before
    lives.check()


def test_a_slot_that_differs_on_one_rank_is_a_divergence_before_anybody_reads_it() -> None:
    lives = group(2)
    lives.serve(PATHS[0])
    state = lives.workers[1].cache.state
    state.pools.host[0]._free[1].reverse()
    number = [lives.begin(rank, Acquire(join_keys(PATHS[1]))) for rank in range(2)]
    lives.run()
    leases = [lives.answers[rank][number[rank]] for rank in range(2)]
    for rank, lease in enumerate(leases):
        assert isinstance(lease, Acquired)
        lives.begin(rank, WriteThrough(lease=lease.lease, deferred=True))
    lives.run()
    for step in range(lives.step, lives.step + 3):
        lives.ask(Advance(step))
    failures = [worker.failure for worker in lives.workers]
    assert all(isinstance(failure, Failed) and failure.error == "Diverged" for failure in failures)
    for worker in lives.workers:
        worker.cache.abandon()


def test_shares_are_the_same_for_a_rank_and_its_machine() -> None:
    lives = group(8, tp=4, pp=2, kv_replicas=2, host=12)
    assert [worker.cache.state.shares for worker in lives.workers] == [Shares(rank, 8, 2, 12) for rank in range(8)]
