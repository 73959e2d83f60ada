"""The group began anew: what was granted before is void, and nothing of it is mixed up with what comes after."""

import asyncio

import pytest

import kvcoord
from kvcoord.client.progress import PendingOutcome
from kvcoord.client.results import GrantedLease
from kvcoord.errors import GroupRenewed, UsageError
from kvcoord.protocol.local import Acquire, Done, Failed, Register, Release, Written
from tests.client.fake import fake_worker
from tests.client.rig import Probe, Rig
from tests.client.scripted import Engine, scripted
from tests.client.test_cache import leased
from tests.client.values import A, acquired

RENEWED = Failed("GroupRenewed", ["g", "rank 2 was restarted"])


def lease_of(probe: Probe) -> GrantedLease:
    lease = probe.results[0]
    assert isinstance(lease, GrantedLease)
    return lease


def test_what_was_granted_before_is_void_and_what_is_granted_after_registering_again_is_not() -> None:
    rig = Rig()
    before = rig.acquire()
    told = rig.advance()
    rig.answer((1, acquired(7)))
    assert lease_of(before).held
    rig.answer((2, RENEWED))
    assert isinstance(told.errors[0], GroupRenewed)
    assert not lease_of(before).held
    rig.ask(Register([]))
    after = rig.acquire()
    rig.answer((3, Done()), (4, acquired(7)))
    assert not lease_of(before).held
    assert lease_of(after).held


def test_a_lease_asked_for_after_the_call_that_was_told_is_void_too() -> None:
    rig = Rig()
    waiting, granted = rig.acquire(landed=True), rig.acquire()
    rig.answer((2, acquired(7)))
    rig.answer((1, RENEWED))
    assert isinstance(waiting.errors[0], GroupRenewed)
    rig.ask(Register([]))
    assert not lease_of(granted).held


def test_a_call_of_before_that_is_told_late_voids_nothing_of_after() -> None:
    rig = Rig()
    rig.advance()
    rig.advance()
    rig.answer((2, RENEWED))
    rig.ask(Register([]))
    write, lease = rig.write(), rig.acquire()
    rig.answer((4, Written(None, "write-through/1/0", 1)), (5, acquired(2, host_pages=1, loaded=[(0, 1)])))
    rig.answer((1, RENEWED))
    assert lease_of(lease).held
    rig.landed("load-back/2/0", 3)
    assert lease_of(lease).landings[-1].over
    assert lease_of(lease).error == ""
    assert not write.results[0].done()  # type: ignore[attr-defined]


def test_registering_for_the_first_time_voids_nothing() -> None:
    rig = Rig()
    lease = rig.acquire()
    rig.answer((1, acquired(7)))
    rig.ask(Register([]))
    assert lease_of(lease).held


def test_outcomes_and_copies_of_before_end_and_those_of_the_same_name_are_others() -> None:
    rig = Rig()
    write, lease = rig.write(), rig.acquire()
    told = rig.advance()
    rig.answer((1, Written(None, "write-through/1/0", 1)), (2, acquired(2, host_pages=1, loaded=[(0, 1)])))
    rig.answer((3, RENEWED))
    assert isinstance(told.errors[0], GroupRenewed)
    pending = write.results[0]
    assert isinstance(pending, PendingOutcome)
    with pytest.raises(GroupRenewed):
        pending.result()
    assert "began anew" in lease_of(lease).error
    rig.ask(Register([]))
    again = rig.acquire()
    rig.answer((5, acquired(2, host_pages=1, loaded=[(0, 1)])))
    assert not lease_of(again).landings[-1].over
    rig.landed("load-back/2/0", 3)
    assert lease_of(again).landings[-1].over
    assert lease_of(again).error == ""


async def test_a_void_lease_is_not_released_and_registering_again_shares_the_same_pages(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        registering = asyncio.create_task(cache.register())
        number, first = await worker.expect(Register)
        worker.answer((number, Done()))
        await registering
        device = cache.device
        async with await leased(cache, worker, acquired(7)) as lease:
            told = asyncio.create_task(cache.acquire([A]))
            worker.answer(((await worker.expect(Acquire))[0], RENEWED))
            with pytest.raises(GroupRenewed):
                await told
            with pytest.raises(UsageError, match="began anew"):
                await lease.write_through()
        registering = asyncio.create_task(cache.register())
        number, second = await worker.expect(Register)
        worker.answer((number, Done()))
        await registering
        assert second == first
        assert cache.device == device
        assert not device[0].closed
        assert Release(7) not in [call for calls in worker.messages for call in calls]


def test_a_void_lease_is_not_released_by_a_blocking_client_either(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        number, first = engine.expect(Register)
        engine.answer((number, Done()))
        engine.answer((engine.expect(Acquire)[0], acquired(7)))
        engine.answer((engine.expect(Acquire)[0], RENEWED))
        number, second = engine.expect(Register)
        engine.answer((number, Done()))
        assert second == first

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        cache.register()
        with cache.acquire([A]) as lease:
            with pytest.raises(GroupRenewed):
                cache.acquire([A])
            assert cache.release_nowait(lease).done()
        cache.register()
