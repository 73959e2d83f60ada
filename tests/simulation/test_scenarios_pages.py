"""Scenarios from the field that are about pages: A to H. The odd rank stands at each position."""

from random import Random

import pytest

from kvcoord.domain import Aborted, Reason, Tier
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Agree,
    Allocate,
    Allocated,
    Evict,
    Failed,
    Free,
    Match,
    Release,
    WriteThrough,
    Written,
    join_keys,
)
from tests.simulation.scripted import ODD_RANKS, SHAPES, Script, hosts, pages

A = pages(1, 2, 3, 4)
B = pages(11, 12)


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_a_a_rank_with_one_page_less_makes_all_abort_and_is_named_with_its_shortfall(
    tp: int, pp: int, odd: int
) -> None:
    script = Script(tp, pp, host=hosts(tp * pp, 8, odd, 7))
    script.write(script.acquire(pages(*range(1, 9)))[0].lease)
    outcomes = [outcome for advanced in script.settle() for outcome in advanced.outcomes]
    assert [str(outcome) for outcome in outcomes] == [
        f"write-through/2/0 aborted (host_full, rank {odd}, host.kv short by 1 pages)"
    ]
    assert all(not rank.copies and rank.worker.cache.state.pools.free_counts()[1] >= 7 for rank in script.ranks)
    script.cache(pages(21, 22, 23, 24))
    assert {script.resident(rank, pages(21, 22, 23, 24), Tier.HOST) for rank in script.everyone} == {4}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_b_polling_has_no_influence_and_an_operation_ends_on_all_at_one_step(
    tp: int, pp: int, odd: int
) -> None:
    script = Script(tp, pp)
    script.hold_copies(odd)
    script.write(script.acquire(A)[0].lease)
    for _ in range(12):
        polls = [script.engines[0].poll(Match(join_keys(A))) for _ in range(100)]
        script.pass_time(0.001)
        assert all(number in script.engines[0].answers for number in polls)
        assert script.advance().completed == []
    script.release_copies(odd)
    completed = [advanced.completed for advanced in script.settle()]
    assert [operations for operations in completed if operations] == [["write-through/2/0"]]
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_c_clocks_that_differ_by_minutes_choose_the_same_victims(tp: int, pp: int) -> None:
    """Every rank's clock starts at a moment of its own."""
    script = Script(tp, pp, host=4)
    script.cache(B)
    script.cache(pages(21, 22))
    assert len({rank.clock.offset_s for rank in script.ranks}) == tp * pp
    script.call(Evict(Tier.HOST, 2))
    kept = {tuple(script.resident(rank, path, Tier.HOST) for path in (B, pages(21, 22))) for rank in script.everyone}
    assert kept == {(0, 2)}
    script.settle()
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_d_host_pages_that_a_load_reads_are_not_evicted(tp: int, pp: int, odd: int) -> None:
    script = Script(tp, pp, host=4, device=8)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.hold_copies(odd)
    load = script.ask(Acquire(join_keys(A), landed=False))
    script.write(script.acquire(B)[0].lease)
    for _ in range(4):
        script.advance()
    assert {script.resident(rank, A, Tier.HOST) for rank in script.everyone} == {4}
    assert {script.resident(rank, B, Tier.HOST) for rank in script.everyone} == {0}
    script.release_copies(odd)
    lease = script.answers(load)[0]
    assert isinstance(lease, Acquired)
    script.settle()
    script.call(Release(lease.lease))
    script.cache(pages(31, 32))
    assert {script.resident(rank, pages(31, 32), Tier.HOST) for rank in script.everyone} == {2}
    script.check_rest()


@pytest.mark.parametrize("phase", ["before the write", "before the copy", "during the copy", "after the copy"])
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_e_requests_cancelled_at_any_phase_leave_nothing_behind(tp: int, pp: int, phase: str) -> None:
    script = Script(tp, pp, host=8, device=12)
    for turn in range(10):
        lease = script.acquire(pages(100 * turn + 1, 100 * turn + 2, 100 * turn + 3, 100 * turn + 4))[0]
        if not lease.outcome:
            script.settle()
            continue
        if phase != "before the write":
            script.call(WriteThrough(lease=lease.lease, deferred=True))
        if phase == "during the copy":
            script.advance()
        elif phase == "after the copy":
            script.settle()
        script.call(Release(lease.lease))
        script.advance()
    script.settle()
    script.call(Evict(Tier.DEVICE, 12))
    script.call(Evict(Tier.HOST, 8))
    assert {tuple(rank.worker.cache.state.pools.free_counts()) for rank in script.ranks} == {(12, 8)}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_scenario_e_two_hundred_cancelled_requests_cost_no_page(tp: int, pp: int) -> None:
    """The phase of each is drawn; small pools, so that a page that is lost is missed soon."""
    script = Script(tp, pp, host=8, device=12)
    rng = Random(tp * pp)
    for turn in range(200):
        lease = script.acquire(pages(*range(10 * turn, 10 * turn + 4)))[0]
        if lease.outcome and rng.random() < 0.7:
            script.call(WriteThrough(lease=lease.lease, deferred=True))
        for _ in range(rng.randrange(3)):
            script.advance()
        if lease.outcome:
            script.call(Release(lease.lease))
        script.advance()
    script.settle()
    script.call(Evict(Tier.DEVICE, 12))
    script.call(Evict(Tier.HOST, 8))
    assert {tuple(rank.worker.cache.state.pools.free_counts()) for rank in script.ranks} == {(12, 8)}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_f_wrong_frees_are_typed_errors_and_change_nothing(tp: int, pp: int) -> None:
    """Never allocated, freed twice, another owner's."""
    script = Script(tp, pp)
    lease = script.acquire(A)[0]
    allocated = script.call(Allocate(2))[0]
    assert isinstance(allocated, Allocated)
    script.call(Free(allocated.slots))
    before = [rank.worker.cache.state.pools.free_counts() for rank in script.ranks]
    for slots in ([[31]], allocated.slots, [lease.slots[0][:1]]):
        for answer in script.call(Free(slots)):
            assert isinstance(answer, Failed)
            assert answer.error == "UsageError"
    assert [rank.worker.cache.state.pools.free_counts() for rank in script.ranks] == before
    script.call(Release(lease.lease))
    script.settle()
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_g_a_run_that_is_split_while_it_is_copied_stays_pinned_on_both_sides(
    tp: int, pp: int, odd: int
) -> None:
    script = Script(tp, pp, device=8)
    script.hold_copies(odd)
    script.write(script.acquire(A)[0].lease)
    other = script.acquire([*A[:2], *pages(1, 2, 99)[2:]])[0]
    assert other.device_pages == 2
    script.call(Release(other.lease))
    script.call(Evict(Tier.DEVICE, 8))
    assert {script.resident(rank, A, Tier.DEVICE) for rank in script.everyone} == {4}
    script.release_copies(odd)
    script.settle()
    assert {script.resident(rank, A, Tier.HOST) for rank in script.everyone} == {4}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_h_a_load_that_fails_on_one_rank_is_retracted_on_all_and_leaves_no_pin(
    tp: int, pp: int, odd: int
) -> None:
    script = Script(tp, pp)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.ranks[odd].copy_weather.fail_share = 1.0
    leases = script.acquire(A)
    assert [bool(lease.error) for lease in leases] == [rank == odd for rank in script.everyone]
    told = script.settle()
    retracted = [one for advanced in told for one in advanced.retracted]
    assert {(reason, rank) for _, reason, rank in retracted} == {(Reason.COPY_FAILED, odd)}
    assert [lease for advanced in told for lease in advanced.broken] == [leases[0].lease]
    written = script.write(leases[0].lease)
    assert {str(one.outcome.reason) for one in written if isinstance(one.outcome, Aborted)} == {"source_gone"}
    script.settle()
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_h_a_load_without_room_leaves_neither_pins_nor_slots(tp: int, pp: int) -> None:
    """The pages that it would have loaded can be evicted at once, and it fits once there is room."""
    script = Script(tp, pp, device=6)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 6))
    holding = script.acquire(pages(31, 32, 33))[0]
    refused = script.call(Acquire(join_keys(A)))
    outcomes = [answer.outcome for answer in refused if isinstance(answer, Acquired)]
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Aborted)} == {Reason.DEVICE_FULL}
    for rank in script.ranks:
        assert rank.worker.cache.state.tree.evictable(Tier.HOST) == 4
        assert rank.worker.cache.state.pools.free(Tier.DEVICE) == 3
    script.call(Release(holding.lease))
    script.settle()
    lease = script.acquire(A)[0]
    assert lease.host_pages == 4
    script.write(lease.lease)
    script.settle()
    script.check_rest()


def test_a_copy_that_never_ends_keeps_its_pages_and_nobody_waits_for_it() -> None:
    """Its pages are quarantined; the engine that needs them is told which limit has passed."""
    script = Script(2, device=8, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.hold_copies(0)
    written = script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    assert all(isinstance(answer, Written) and answer.outcome for answer in written)
    script.engines[0].restart()
    number = script.engines[0].ask(Agree("later", True))
    script.pass_time(6.0)
    answer = script.engines[0].answers[number]
    assert isinstance(answer, Failed)
    assert answer.error == "DeadlineExceeded"
    assert answer.fields[1:] == ["copy_timeout_s", 5.0]
    script.close()
