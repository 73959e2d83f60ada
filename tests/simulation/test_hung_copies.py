"""Copies that never end: their pages are kept, whoever waits is answered, and the group goes on without them."""

import pytest

from kvcoord.domain import Reason, Tier
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advanced,
    Evict,
    LoadBack,
    Loaded,
    Release,
    WriteThrough,
    join_keys,
)
from tests.simulation.scripted import CORNERS, Script, pages

A = pages(1, 2, 3, 4)
B = pages(11, 12)

MANY = [sweep for sweep in CORNERS if sweep[:2] != (1, 1)]


@pytest.mark.parametrize(("tp", "pp", "odd"), MANY)
def test_whoever_waits_for_a_load_that_never_lands_is_answered_and_the_group_goes_on(
    tp: int, pp: int, odd: int
) -> None:
    """The copy's timeout answers; the group hears of it, retracts and names the rank; the pages are never reused."""
    script = Script(tp, pp, device=8)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 8))
    script.hold_copies(odd)
    asked_at = script.world.agenda.now
    leases = script.acquire(A)
    assert script.world.agenda.now - asked_at < script.world.shape.timeouts.copy_timeout_s + 1.0
    assert [lease.error for lease in leases] == ["copy_timeout" if rank == odd else "" for rank in script.everyone]
    script.ranks[odd].copy_weather.stuck = 0
    told: list[Advanced] = []
    while not any(advanced.broken for advanced in told):
        told.append(script.advance())
        script.pass_time(0.5)
    assert [one[1:] for advanced in told for one in advanced.retracted] == [(Reason.COPY_TIMEOUT, odd)]
    script.call(Release(leases[0].lease))
    script.write(script.acquire(B)[0].lease)
    for _ in range(6):
        script.advance()
        script.pass_time(0.1)
    assert {script.resident(rank, B, Tier.HOST) for rank in script.everyone} == {2}
    assert {pool.quarantined_count for pool in script.ranks[odd].pools if pool.name == "device.kv"} == {4}
    script.ranks[odd].release_held()
    script.settle()
    script.check_rest()


@pytest.mark.parametrize("odd", [0, 1])
def test_without_lockstep_a_load_back_that_never_lands_is_answered(odd: int) -> None:
    script = Script(2, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.hold_copies(odd)
    answers = script.answers(script.ask(LoadBack(join_keys(A), [[4, 5, 6, 7]], "load", landed=True)), 6.0)
    assert [answer.error for answer in answers if isinstance(answer, Loaded)] == [
        "copy_timeout" if rank == odd else "" for rank in script.everyone
    ]
    script.release_copies(odd)
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.check_rest()


def test_a_copy_that_lands_after_it_was_given_up_is_retracted_all_the_same() -> None:
    """What the engine computed meanwhile is void: it was told so, and no rank may publish it."""
    script = Script(2)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.hold_copies(0, 1)
    leases = script.acquire(A)
    assert [lease.error for lease in leases] == ["copy_timeout"] * 2
    script.release_copies(0, 1)
    told = script.settle()
    assert {one[1] for advanced in told for one in advanced.retracted} == {Reason.COPY_TIMEOUT}
    assert [lease for advanced in told for lease in advanced.broken] == [leases[0].lease]
    script.call(Release(leases[0].lease))
    script.settle()
    script.check_rest()


def test_a_lease_that_shares_a_load_that_was_given_up_does_not_wait_for_it_again() -> None:
    script = Script(2)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.hold_copies(1)
    first = script.acquire(A)
    before = script.world.agenda.now
    second = script.answers(script.ask(Acquire(join_keys(A))))
    assert script.world.agenda.now - before < 0.01
    assert [answer.error for answer in second if isinstance(answer, Acquired)] == [lease.error for lease in first]
    script.close()
