"""Pools that keep only the end of a sequence: what is usable, what is copied, what goes first, and what is agreed."""

import pytest

from kvcoord.controller.effects import StartCopy
from kvcoord.domain import Aborted, Committed, OperationKind, Outcome, PageKey, Path, Reason, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import (
    NO_SLOT,
    Acquire,
    Allocate,
    Allocated,
    Evict,
    Failed,
    Free,
    LoadBack,
    Release,
    WriteThrough,
    Written,
    join_keys,
)
from tests.controller.cluster import Cluster
from tests.controller.hybrid import HybridCluster, pools

PATH = block_page_keys(range(1, 9))
OTHER = block_page_keys(range(101, 109))


def held(slots: list[int]) -> list[int]:
    """Positions that have a slot."""
    return [at for at, slot in enumerate(slots) if slot != NO_SLOT]


def evict_tails(cluster: HybridCluster, tier: Tier, key: PageKey, number: int) -> None:
    """One page loses its slot in one pool of ends, on all ranks, as an agreed eviction would have it."""
    for worker in cluster.workers:
        state = worker.cache.state
        slot = state.tree.tails.on(tier)[number].drop(key)
        state.pools.free_slots(tier, state.pools.beside_pages(tuple([[slot]] if not number else [[], [slot]])), "index")


def test_a_lease_has_slots_for_the_end_that_it_computes_and_the_end_that_it_goes_on_from() -> None:
    cluster = HybridCluster(2, 40, 40)
    first = cluster.acquire(PATH[:5])[0]
    assert [held(slots) for slots in first.slots] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 3, 4], [4]]
    cluster.hand_in(first)
    again = cluster.acquire(PATH)[0]
    assert (again.device_pages, again.host_pages) == (5, 0)
    assert [held(slots) for slots in again.slots] == [[*range(8)], [*range(8)], [2, 3, 4, 5, 6, 7], [4, 7]]
    assert again.slots[2][2:5] == first.slots[2][2:5]
    assert again.slots[3][4] == first.slots[3][4] != again.slots[3][7]
    cluster.hand_in(again)
    cluster.settle()
    cluster.check()


def test_a_prefix_is_usable_only_where_its_own_window_and_its_own_state_are() -> None:
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH[:4])
    cluster.serve(PATH)
    assert cluster.matched(PATH) == (8, 0)
    assert cluster.matched(PATH[:7]) == (4, 0), "no request has ended with the seventh page"
    evict_tails(cluster, Tier.DEVICE, PATH[7], 1)
    assert cluster.matched(PATH) == (7, 1), "the state of the end is on the host still"
    evict_tails(cluster, Tier.HOST, PATH[7], 1)
    assert cluster.matched(PATH) == (4, 0)
    evict_tails(cluster, Tier.DEVICE, PATH[3], 0)
    evict_tails(cluster, Tier.HOST, PATH[3], 0)
    assert cluster.matched(PATH) == (0, 0)
    cluster.check()


def test_a_window_on_two_tiers_is_put_together() -> None:
    """Scenario: of the three pages of the window two are on the device, the third has to be loaded."""
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH[:5])
    evict_tails(cluster, Tier.DEVICE, PATH[3], 0)
    lease = cluster.acquire(PATH[:5])[0]
    assert (lease.device_pages, lease.host_pages) == (3, 1 + 1), "what follows the page that is loaded counts as host"
    cluster.hand_in(lease)
    cluster.settle()
    assert cluster.matched(PATH[:5]) == (5, 0)
    cluster.check()


def test_copies_move_only_the_pages_that_each_pool_has() -> None:
    cluster = HybridCluster(1, 40, 40)
    cluster.held = {0}
    lease = cluster.acquire(PATH)[0]
    cluster.hand_in(lease)
    (write,) = cluster.copies[0]
    assert [len(slots) for slots in write.source_slots] == [8, 8, 3, 1]
    assert write.source_slots[2] == lease.slots[2][5:]
    cluster.held = set()
    cluster.settle()
    cluster.ask(Evict(Tier.DEVICE, 4))
    cluster.held = {0}
    cluster.begin(0, Acquire(join_keys(PATH), landed=False))
    (load,) = cluster.copies[0]
    assert [len(slots) for slots in load.destination_slots] == [4, 4, 3, 1]
    assert loads_what_was_written(load, write)
    cluster.held = set()
    cluster.run()
    cluster.settle()


def loads_what_was_written(load: StartCopy, write: StartCopy) -> bool:
    """Whether every slot that is read was written."""
    pairs = zip(load.source_slots, write.destination_slots, strict=True)
    return all(set(read) <= set(written) for read, written in pairs)


def test_two_requests_for_one_end_share_its_load() -> None:
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH)
    cluster.ask(Evict(Tier.DEVICE, 8))
    cluster.held = {0, 1}
    first = cluster.acquire(PATH, landed=False)
    second = cluster.acquire(PATH, landed=False)
    assert [len(copies) for copies in cluster.copies] == [1, 1]
    assert [lease.slots for lease in first] == [lease.slots for lease in second]
    assert second[0].loaded == []
    cluster.held = set()
    cluster.ask(Release(first[0].lease), Release(second[0].lease))
    cluster.settle()
    cluster.check()
    assert cluster.matched(PATH) == (8, 0)


def test_whoever_shares_the_load_of_an_end_alone_waits_for_it_too() -> None:
    cluster = HybridCluster(1, 40, 40)
    cluster.serve(PATH)
    evict_tails(cluster, Tier.DEVICE, PATH[7], 1)
    cluster.held = {0}
    cluster.acquire(PATH, landed=False)
    waiting = cluster.begin(0, Acquire(join_keys(PATH), landed=True))
    assert len(cluster.copies[0]) == 1
    assert waiting not in cluster.answers[0]
    cluster.copy_ended(0)
    assert waiting in cluster.answers[0]
    cluster.held = set()
    cluster.settle()


def test_an_end_that_was_loaded_stays_while_its_request_runs() -> None:
    cluster = HybridCluster(2, 40, 40, device_states=2)
    cluster.serve(PATH)
    cluster.ask(Evict(Tier.DEVICE, 8))
    running = cluster.acquire(PATH)[0]
    cluster.settle()
    assert cluster.acquire(OTHER[:1])[0].outcome
    assert not cluster.acquire(OTHER[1:2])[0].outcome
    assert cluster.workers[0].cache.state.tree.tails.counts(Tier.DEVICE) == [3, 1]
    cluster.ask(Release(running.lease))
    assert cluster.acquire(OTHER[1:2])[0].outcome


def test_ends_that_go_with_evicted_pages_are_free_at_once_on_all_ranks() -> None:
    cluster = HybridCluster(2, 8, 40, device_states=2)
    cluster.serve(PATH[:4])
    cluster.serve(OTHER[:4])
    third = cluster.acquire(block_page_keys(range(201, 205)))[0]
    assert isinstance(third.outcome, Committed)
    assert third.outcome.path is Path.COVERED
    cluster.ask(Release(third.lease))
    cluster.check()


def test_an_end_that_is_loaded_before_its_own_page_stays_with_its_lease() -> None:
    """The pages are being loaded for a longer request; the load of the shorter one's end overtakes that."""
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH[:4])
    cluster.serve(PATH)
    cluster.ask(Evict(Tier.DEVICE, 8))
    cluster.held = {0, 1}
    longer = cluster.acquire(PATH, landed=False)[0]
    shorter = cluster.acquire(PATH[:4], landed=False)[0]
    assert shorter.loaded == []
    for rank, copies in enumerate(cluster.copies):
        copies.rotate(1)
        cluster.copy_ended(rank)
    ended = [name for _ in range(3) for name in cluster.advance().completed]
    assert ended == [shorter.operation]
    for worker in cluster.workers:
        states = worker.cache.state.pools.device[3]
        assert states.owner(shorter.slots[3][3]) == shorter.operation
    cluster.held = set()
    cluster.ask(Release(shorter.lease), Release(longer.lease))
    cluster.settle()
    cluster.check()


def test_a_load_that_fails_on_one_rank_takes_pages_and_ends_back_everywhere() -> None:
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH)
    cluster.ask(Evict(Tier.DEVICE, 8))
    cluster.held = {0, 1}
    lease = cluster.acquire(PATH, landed=False)[0]
    cluster.copy_ended(0)
    cluster.copy_ended(1, Reason.COPY_FAILED)
    cluster.held = set()
    cluster.ask(Release(lease.lease))
    cluster.settle()
    assert cluster.matched(PATH) == (0, 0)
    cluster.check()
    for worker in cluster.workers:
        assert all(pool.free_count == pool.capacity for pool in worker.cache.state.pools.device)
        assert all(pool.free_count == pool.capacity for pool in worker.cache.state.pools.host)


def test_an_end_that_one_rank_cannot_load_is_dropped_and_its_pages_stay() -> None:
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH)
    evict_tails(cluster, Tier.DEVICE, PATH[7], 1)
    cluster.held = {0, 1}
    lease = cluster.acquire(PATH, landed=False)[0]
    cluster.copy_ended(0, Reason.COPY_FAILED)
    cluster.copy_ended(1)
    cluster.held = set()
    cluster.ask(Release(lease.lease))
    cluster.settle()
    assert cluster.matched(PATH) == (0, 0)
    for worker in cluster.workers:
        tree = worker.cache.state.tree
        assert (tree.pages(Tier.DEVICE), tree.pages(Tier.HOST)) == (8, 8)
        assert [tree.tails.counts(tier) for tier in Tier] == [[3, 0], [3, 0]]
    cluster.check()


def test_ends_go_before_pages_and_the_pages_stay() -> None:
    """The state pool holds two sequences: the third one pushes out the oldest end, and no page."""
    cluster = HybridCluster(2, 40, 40, device_states=2, host_states=2)
    for path in (PATH[:4], OTHER[:4], OTHER[:6]):
        cluster.serve(path)
    assert cluster.matched(PATH[:4]) == (0, 0)
    assert cluster.matched(OTHER) == (6, 0)
    for worker in cluster.workers:
        assert worker.cache.state.tree.pages(Tier.DEVICE) == 10
        assert worker.cache.state.counters.pages_evicted == {Tier.DEVICE: 0, Tier.HOST: 0}
    cluster.check()


def test_an_end_goes_with_its_page() -> None:
    cluster = HybridCluster(2, 8, 40)
    cluster.serve(PATH[:6])
    cluster.serve(OTHER[:6])
    for worker in cluster.workers:
        tree = worker.cache.state.tree
        assert tree.pages(Tier.DEVICE) == 8
        assert tree.tails.counts(Tier.DEVICE) == [3, 1]
        assert tree.tails.counts(Tier.HOST) == [6, 2]
    assert cluster.matched(OTHER[:6]) == (6, 0)
    assert cluster.matched(PATH[:6]) == (2, 4)
    cluster.check()


def test_the_end_of_a_running_request_is_not_evicted() -> None:
    cluster = HybridCluster(2, 40, 40, device_states=2)
    cluster.serve(PATH[:4])
    running = cluster.acquire(PATH[:5])[0]
    refused = cluster.acquire(OTHER[:2])[0]
    assert isinstance(refused.outcome, Aborted)
    assert refused.outcome.reason is Reason.AUXILIARY_FULL
    assert refused.outcome.shortfall == {"device.state": 1}
    cluster.hand_in(running)
    cluster.settle()
    assert cluster.acquire(OTHER[:2])[0].outcome
    cluster.check()


def test_the_agreed_capacity_of_each_pool_counts_on_its_own() -> None:
    """The last rank has room for fewer states and a shorter stretch of windows on the host: it counts for all."""
    cluster = HybridCluster(3, 40, 40, last={"host_states": 3, "host_window": 7})
    for number in range(6):
        cluster.serve(block_page_keys([number + 1, number + 50, number + 90]))
    for worker in cluster.workers:
        assert worker.cache.state.tree.tails.counts(Tier.HOST) == [7, 3]
        assert worker.cache.state.tree.pages(Tier.HOST) == 18
    cluster.check()


def test_a_write_that_is_one_state_short_on_one_rank_is_tried_again_after_all_have_evicted_one() -> None:
    """The first write holds the only state of the last rank when the second is voted on, and can be evicted later."""
    cluster = HybridCluster(2, 40, 40, host_states=2, last={"host_states": 1})
    cluster.serve(PATH[:4])
    lease, other = cluster.acquire(OTHER[:4])[0], cluster.acquire(OTHER[4:])[0]
    cluster.hand_in(lease)
    cluster.hand_in(other)
    (outcome,) = [outcome for _ in range(4) for outcome in cluster.advance().outcomes]
    assert isinstance(outcome, Committed)
    assert outcome.operation.endswith("/1"), "the second attempt"
    voted = (OperationKind.WRITE_THROUGH, Path.VOTED, Outcome.ABORT, Reason.AUXILIARY_FULL)
    assert [worker.cache.state.counters.decisions[voted] for worker in cluster.workers] == [1, 1]
    assert [worker.cache.state.tree.tails.counts(Tier.HOST) for worker in cluster.workers] == [[9, 1], [9, 1]]
    cluster.settle()
    cluster.check()


def test_a_rank_with_another_window_is_refused_at_join_with_the_option_the_ranks_and_both_values() -> None:
    other = pools()
    other[2] = {**other[2], "window_pages": 4}
    cluster = Cluster(2, 8, 8, pools_by_rank=[pools(), other])
    (failure,) = [worker.failure for worker in cluster.workers if worker.failure is not None]
    assert failure.error == "JoinRefused"
    assert failure.fields[2:] == ["pools.window.window_pages", 1, 4, 0, 3]


def test_slots_of_the_engines_own_come_with_their_ends() -> None:
    cluster = HybridCluster(2, 40, 40)
    (allocated,) = {str(answer): answer for (answer,) in cluster.ask(Allocate(5))}.values()
    assert isinstance(allocated, Allocated)
    assert [len(slots) for slots in allocated.slots] == [5, 5, 3, 1]
    cluster.ask(WriteThrough(join_keys(PATH[:5]), allocated.slots))
    cluster.settle()
    assert cluster.matched(PATH) == (5, 0)
    more = cluster.ask(Allocate(2))[0][0]
    assert isinstance(more, Allocated)
    cluster.ask(Free(more.slots))
    cluster.check()


@pytest.mark.parametrize("ends", [[[0], []], [[0, 1, 2], [0, 1]], [[], []]])
def test_slots_that_are_no_end_of_the_path_are_refused(ends: list[list[int]]) -> None:
    cluster = HybridCluster(1, 40, 40)
    cluster.ask(Allocate(5))
    answer = cluster.ask(WriteThrough(join_keys(PATH[:5]), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], *ends]))[0][0]
    assert isinstance(answer, Failed)
    assert answer.error == "UsageError"


def test_loading_into_slots_of_the_engine_is_refused_with_what_to_do() -> None:
    cluster = HybridCluster(1, 40, 40)
    answer = cluster.ask(LoadBack(join_keys(PATH), [[], [], [], []]))[0][0]
    assert isinstance(answer, Failed)
    assert "acquire the path" in str(answer.fields)


def test_recomputed_pages_give_a_lost_end_back() -> None:
    """The pages are cached, but their window is gone: the engine computes them again, and only the end is news."""
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH[:6])
    for tier in Tier:
        evict_tails(cluster, tier, PATH[5], 0)
    assert cluster.matched(PATH[:6]) == (0, 0)
    lease = cluster.acquire(PATH[:6])[0]
    written = cluster.ask(WriteThrough(lease=lease.lease), Release(lease.lease))[0][0]
    assert isinstance(written, Written)
    assert written.pages == 0, "no page has to be copied, only one slot of its window"
    cluster.settle()
    assert cluster.matched(PATH[:6]) == (6, 0)
    cluster.ask(Evict(Tier.DEVICE, 6))
    assert cluster.matched(PATH[:6]) == (0, 6)
    cluster.check()


def test_an_engine_is_told_of_a_copy_that_moves_ends_alone() -> None:
    cluster = HybridCluster(2, 40, 40)
    cluster.serve(PATH[:6])
    evict_tails(cluster, Tier.DEVICE, PATH[5], 1)
    cluster.held = {0, 1}
    lease = cluster.acquire(PATH[:6], landed=False)[0]
    assert (lease.device_pages, lease.host_pages, lease.loaded) == (5, 1, [])
    assert [len(copies) for copies in cluster.copies] == [1, 1]
    cluster.held = set()
    cluster.ask(Release(lease.lease))
    ended = [name for _ in range(3) for name in cluster.advance().completed]
    assert ended == [lease.operation]
    cluster.check()


def test_nothing_is_evicted_when_one_pool_cannot_give_enough() -> None:
    """The request needs two pages more, which could go, and a state, which cannot: so no page goes either."""
    cluster = HybridCluster(2, 12, 40, device_states=2)
    cluster.serve(PATH[:4])
    running = [cluster.acquire(path)[0] for path in (OTHER[:1], PATH[5:6])]
    tree = cluster.workers[0].cache.state.tree
    assert tree.evictable(Tier.DEVICE) == 4
    refused = cluster.acquire(block_page_keys(range(201, 209)))[0]
    assert isinstance(refused.outcome, Aborted)
    assert refused.outcome.shortfall == {"device.kv": 2, "device.index": 2, "device.state": 1}
    assert tree.evictable(Tier.DEVICE) == 4
    for lease in running:
        cluster.ask(Release(lease.lease))
    cluster.check()


def test_an_end_that_was_not_written_goes_to_the_host_with_its_pages_later() -> None:
    """Selective write-through: the pages of a turn are written when a later turn has used them often enough."""
    shape = {"world_size": 1, "write_policy": "write-through-selective", "write_hits_min": 2}
    cluster = Cluster(1, 40, 40, pools_by_rank=[pools()], **shape)
    for end in (3, 5, 6):
        cluster.serve(PATH[:end])
    tree = cluster.workers[0].cache.state.tree
    assert tree.resident(PATH, Tier.HOST) == [(0, 3)]
    assert tree.tails.counts(Tier.HOST) == [3, 1]
    cluster.ask(Evict(Tier.DEVICE, 6))
    assert tree.match(PATH).host_pages == 3
    cluster.check()
