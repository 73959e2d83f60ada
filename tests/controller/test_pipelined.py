"""Requests that overlap: many steps before anything settles, copies that end late, fail, or on one rank only."""

import random

import pytest

from kvcoord.domain import PageKey, Reason, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import Acquire, Acquired, Release, WriteThrough, join_keys
from tests.controller.cluster import Cluster

PROMPTS = [[0, *range(10 * prompt, 10 * prompt + prompt % 7 + 1)] for prompt in range(1, 30)]


def keys_of(rng: random.Random) -> list[PageKey]:
    prompt = rng.choice(PROMPTS)
    return block_page_keys(prompt[: rng.randint(1, len(prompt))])


def play(cluster: Cluster, seed: int, steps: int, fail_share: float = 0.0) -> dict[str, int]:
    """Random requests with random delays of copies on random ranks. Returns what happened."""
    rng = random.Random(seed)
    seen = {"granted": 0, "aborted": 0, "retracted": 0}
    running: list[int] = []
    for _ in range(steps):
        for rank in range(len(cluster.workers)):
            cluster.held.discard(rank) if rng.random() < 0.4 else cluster.held.add(rank)
            while cluster.copies[rank] and rng.random() < 0.5:
                cluster.copy_ended(rank, Reason.COPY_FAILED if rng.random() < fail_share else None)
        cluster.run()
        seen["retracted"] += len(cluster.advance().retracted)
        for _ in range(rng.randint(0, 2)):
            answers = [rank[0] for rank in cluster.ask(Acquire(join_keys(keys_of(rng)), landed=False))]
            outcomes = set()
            for answer in answers:
                assert isinstance(answer, Acquired)
                outcomes.add((bool(answer.outcome), answer.lease, answer.device_pages, answer.host_pages))
            assert len(outcomes) == 1, "all ranks take the same way"
            granted, lease, _, _ = outcomes.pop()
            seen["granted" if granted else "aborted"] += 1
            if granted:
                running.append(lease)
        while running and rng.random() < 0.6:
            lease = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.9:
                cluster.ask(WriteThrough(lease=lease, deferred=True))
            cluster.ask(Release(lease))
    for lease in running:
        cluster.ask(Release(lease))
    cluster.held.clear()
    cluster.run()
    cluster.settle()
    cluster.check()
    return seen


@pytest.mark.parametrize("policy", ["write-through", "write-through-selective", "write-back"])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_stay_equal_while_copies_end_at_different_times(policy: str, seed: int) -> None:
    cluster = Cluster(3, device=24, host=[20, 21, 20], write_policy=policy)
    assert play(cluster, seed, steps=150)["granted"] > 50


@pytest.mark.parametrize("eviction", ["lfu", "priority"])
def test_ranks_stay_equal_under_other_eviction_orders(eviction: str) -> None:
    play(Cluster(2, device=24, host=16, eviction=eviction), seed=1, steps=200)


@pytest.mark.parametrize("seed", range(6))
def test_a_failed_copy_is_retracted_on_all_ranks_and_leaks_nothing(seed: int) -> None:
    cluster = Cluster(3, device=24, host=[20, 23, 22])
    assert play(cluster, seed, steps=150, fail_share=0.2)["retracted"] > 5


@pytest.mark.parametrize("seed", range(4))
def test_pipeline_stages_stay_equal_without_immediate_votes(seed: int) -> None:
    cluster = Cluster(4, device=24, host=[16, 16, 15, 16], tp=2, pp=2, lag=2)
    play(cluster, seed, steps=150)
    immediate = [
        key for worker in cluster.workers for key in worker.cache.state.counters.decisions if key[1] == "immediate"
    ]
    assert immediate == []


def test_one_operation_too_many_is_aborted_on_all_ranks_alike() -> None:
    cluster = Cluster(2, device=64, host=64, limits={"operations_open_max": 2})
    answers = [cluster.ask(Acquire(join_keys(block_page_keys([prompt])))) for prompt in range(3)]
    for rank in range(2):
        last = answers[2][rank][0]
        assert isinstance(last, Acquired)
        assert str(last.outcome) == f"allocate/3/0 aborted (limit, rank {rank})"
    leases = [answer[0][0] for answer in answers[:2]]
    for lease in leases:
        assert isinstance(lease, Acquired)
        cluster.ask(Release(lease.lease))
    cluster.settle()
    cluster.check()


def test_pages_that_one_rank_cannot_load_are_a_miss_on_all_ranks_from_then_on() -> None:
    cluster = Cluster(3, device=8, host=20)
    keys, other = block_page_keys([1, 2, 3, 4]), block_page_keys(range(10, 18))
    cluster.serve(keys)
    cluster.serve(other)
    cluster.held = {0, 1, 2}
    numbers = [cluster.begin(rank, Acquire(join_keys(keys), landed=False)) for rank in range(3)]
    cluster.run()
    leases: set[int] = set()
    for rank in range(3):
        loading = cluster.answers[rank][numbers[rank]]
        assert isinstance(loading, Acquired)
        assert loading.host_pages == len(keys)
        leases.add(loading.lease)
        cluster.copy_ended(rank, Reason.COPY_FAILED if rank == 1 else None)
    cluster.held.clear()
    cluster.ask(*(Release(lease) for lease in leases))
    cluster.settle()
    cluster.check()
    assert cluster.serve(keys) == (0, 0)
    assert cluster.serve(other)[0] + cluster.serve(other)[1] > 0
    assert cluster.serve(keys)[1] == len(keys)
    cluster.check()


def test_a_retraction_is_told_once_and_pins_stay_until_the_last_copy_is_over() -> None:
    cluster = Cluster(2, device=4, host=4)
    cluster.advance()
    cluster.held.update((0, 1))
    keys = block_page_keys([1, 2])
    lease = cluster.ask(Acquire(join_keys(keys)))[0][0]
    assert isinstance(lease, Acquired)
    cluster.ask(WriteThrough(lease=lease.lease, deferred=True), Release(lease.lease))
    cluster.copy_ended(0, Reason.COPY_FAILED)
    cluster.run()
    told = [cluster.advance().retracted for _ in range(3)]
    assert [len(retracted) for retracted in told if retracted] == [1]
    trees = [worker.cache.state.tree for worker in cluster.workers]
    assert [tree.evictable(Tier.DEVICE) for tree in trees] == [0, 0], "rank 1 still copies from these pages"
    cluster.copy_ended(1)
    cluster.run()
    assert [retracted for _ in range(3) if (retracted := cluster.advance().retracted)] == []
    assert [tree.evictable(Tier.DEVICE) for tree in trees] == [2, 2]
    assert all(sum(worker.cache.state.counters.retractions.values()) == 1 for worker in cluster.workers)
    cluster.check()
