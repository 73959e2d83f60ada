"""Engines without lockstep: they come to the same operations at different times and in different orders."""

import random

import pytest

from kvcoord.domain import Aborted, Agreement, Committed, PageKey, Path, Reason, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import (
    Advance,
    Agree,
    Agreed,
    Call,
    Failed,
    LoadBack,
    Loaded,
    WriteThrough,
    Written,
    join_keys,
)
from tests.controller.cluster import Cluster

PROMPTS = [block_page_keys([prompt, *range(100 * prompt, 100 * prompt + prompt % 5 + 2)]) for prompt in range(1, 13)]


def write(name: str, keys: list[PageKey]) -> WriteThrough:
    return WriteThrough(keys=join_keys(keys), slots=[list(range(len(keys)))], operation=name)


def load(name: str, keys: list[PageKey]) -> LoadBack:
    return LoadBack(join_keys(keys), [list(range(len(keys)))], name, landed=True)


def streaming(ranks: int, host: int | list[int]) -> Cluster:
    return Cluster(ranks, 1000, host, lockstep=False)


def run_on_all(cluster: Cluster, *calls: Call) -> list[list[object]]:
    return [list(rank) for rank in cluster.ask(*calls)]


def test_a_write_commits_and_is_loaded_back_on_all_ranks() -> None:
    cluster = streaming(2, 20)
    for (written,) in run_on_all(cluster, write("w", PROMPTS[3])):
        assert isinstance(written, Written)
        assert isinstance(written.outcome, Committed)
    for (loaded,) in run_on_all(cluster, load("l", PROMPTS[3])):
        assert isinstance(loaded, Loaded)
        assert loaded.pages == len(PROMPTS[3])
    cluster.check()


def test_a_rank_that_is_full_aborts_the_write_on_all_and_is_named_with_its_shortfall() -> None:
    cluster = streaming(2, [8, 3])
    answers = run_on_all(cluster, write("w", PROMPTS[3]))
    for (written,) in answers:
        assert isinstance(written, Written)
        assert written.outcome == Aborted("w/1", Path.IMMEDIATE, Reason.HOST_FULL, 1, {"host.kv": len(PROMPTS[3]) - 3})
    cluster.check()
    assert all(worker.cache.state.pools.host[0].free_count in (8, 3) for worker in cluster.workers)


def test_room_is_made_by_an_eviction_that_all_ranks_agree_to_and_the_write_is_tried_once_more() -> None:
    cluster = streaming(3, [10, 9, 10])
    names = iter("abcdefgh")
    for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[6], PROMPTS[7]):
        for (written,) in run_on_all(cluster, write(next(names), prompt)):
            assert isinstance(written, Written)
            assert written.outcome
    cluster.check()
    assert {worker.cache.state.counters.pages_evicted[Tier.HOST] for worker in cluster.workers} != {0}


def test_a_rank_that_comes_late_to_an_aborted_write_goes_straight_to_the_second_attempt() -> None:
    cluster = streaming(2, [10, 8])
    run_on_all(cluster, write("first", PROMPTS[3]))
    early = cluster.begin(1, write("second", PROMPTS[8]))
    cluster.run()
    assert early not in cluster.answers[1]
    late = cluster.begin(0, write("second", PROMPTS[8]))
    cluster.run()
    for rank, number in ((1, early), (0, late)):
        written = cluster.answers[rank][number]
        assert isinstance(written, Written)
        assert isinstance(written.outcome, Committed)
        assert written.operation == "second/1"
    cluster.check()


def test_all_ranks_load_the_prefix_that_every_rank_holds() -> None:
    cluster = streaming(2, 20)
    run_on_all(cluster, write("w", PROMPTS[3][:3]))
    for (loaded,) in run_on_all(cluster, load("l", PROMPTS[3])):
        assert isinstance(loaded, Loaded)
        assert loaded.pages == 3
    for (loaded,) in run_on_all(cluster, load("nothing", PROMPTS[5])):
        assert isinstance(loaded, Loaded)
        assert loaded.pages == 0
    cluster.check()


def test_a_rank_that_never_votes_makes_an_abort_by_timeout_and_is_named() -> None:
    cluster = streaming(2, 20)
    number = cluster.begin(0, write("w", PROMPTS[3]))
    cluster.run()
    for _ in range(12):
        cluster.pass_time(0.5)
    written = cluster.answers[0][number]
    assert isinstance(written, Written)
    assert written.outcome == Aborted("w/0", Path.IMMEDIATE, Reason.VOTE_TIMEOUT, 1, {})
    cluster.check()


def test_an_engine_agrees_on_matters_of_its_own() -> None:
    cluster = streaming(3, 8)
    numbers = [cluster.begin(rank, Agree("length", True, Agreement.MIN, value=10 + rank)) for rank in (2, 0, 1)]
    cluster.run()
    for rank, number in zip((2, 0, 1), numbers, strict=True):
        answer = cluster.answers[rank][number]
        assert isinstance(answer, Agreed)
        assert answer.outcome == Committed("length", Path.IMMEDIATE, 10)


def test_a_call_for_lockstep_engines_is_refused_with_the_option_to_set() -> None:
    for (answer,) in run_on_all(streaming(1, 8), Advance(0)):
        assert isinstance(answer, Failed)
        assert answer.error == "UsageError"
        assert "group.lockstep" in str(answer.fields[2])


@pytest.mark.parametrize("seed", range(12))
def test_ranks_stay_equal_in_any_order_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    cluster = streaming(ranks, [rng.randint(12, 16) for _ in range(ranks)])
    waiting: list[list[Call]] = [[] for _ in range(ranks)]
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(80):
        keys = rng.choice(PROMPTS)
        call = write(f"w{turn}", keys) if rng.random() < 0.6 else load(f"l{turn}", keys)
        for calls in waiting:
            calls.insert(rng.randint(max(0, len(calls) - 2), len(calls)), call)
        for rank in range(ranks):
            cluster.held.discard(rank) if rng.random() < 0.5 else cluster.held.add(rank)
            while waiting[rank] and rng.random() < 0.8:
                numbers[rank].append(cluster.begin(rank, waiting[rank].pop(0)))
        if rng.random() < 0.7:
            cluster.run()
    for rank in range(ranks):
        numbers[rank] += [cluster.begin(rank, call) for call in waiting[rank]]
    cluster.held.clear()
    cluster.run()
    for rank in range(ranks):
        assert all(number in cluster.answers[rank] for number in numbers[rank])
        assert cluster.workers[rank].cache.open_count() == 0
    cluster.check()
