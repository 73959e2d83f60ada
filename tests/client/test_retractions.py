"""A load-back that the group takes back: whoever holds its pages hears so, here and on every rank."""

import asyncio

import msgspec
import pytest

import kvcoord
from kvcoord.client import reading
from kvcoord.client.progress import missing
from kvcoord.client.results import GrantedLease
from kvcoord.domain import Reason
from kvcoord.errors import LoadRetracted
from kvcoord.protocol.local import Acquire, Acquired, Advance, Advanced, Done, LoadBack, Loaded, Open, Release
from tests.client.fake import fake_worker
from tests.client.rig import Probe, Rig
from tests.client.scripted import Engine, scripted
from tests.client.values import INFO, A, B, acquired, committed

RETRACTED = Advanced(1, 0, [], [], [("load-back/7/0", Reason.COPY_FAILED, 3)], 0, [7])


def lease_of(probe: Probe) -> GrantedLease:
    lease = probe.results[0]
    assert isinstance(lease, GrantedLease)
    return lease


def loading(lease: int) -> Acquired:
    return acquired(lease, host_pages=2, loaded=[(0, 2)])


def opened() -> Rig:
    """A session with a lockstep engine's worker."""
    rig = Rig()
    rig.ask(Open(1), reading.read_opened)
    rig.answer((1, INFO))
    return rig


def test_a_lease_whose_own_copy_has_landed_is_void_when_another_ranks_has_failed() -> None:
    rig = opened()
    probe = rig.acquire()
    rig.answer((2, loading(7)))
    rig.landed("load-back/7/0", 3)
    assert missing(lease_of(probe).landings, 3) is None
    rig.advance()
    rig.answer((3, RETRACTED))
    with pytest.raises(LoadRetracted) as raised:
        missing(lease_of(probe).landings, 3)
    assert (raised.value.operation, raised.value.reason, raised.value.rank) == ("load-back/7/0", "copy_failed", 3)
    assert lease_of(probe).error == str(raised.value)


def test_leases_that_share_it_are_void_and_others_are_not() -> None:
    rig = opened()
    first, shares, other = rig.acquire(), rig.acquire(), rig.acquire()
    rig.answer((2, loading(7)), (3, acquired(8, host_pages=2)), (4, acquired(9, device_pages=2)))
    rig.advance()
    rig.answer((5, Advanced(1, 0, [], [], [("load-back/7/0", Reason.COPY_FAILED, 3)], 0, [7, 8])))
    for probe in (first, shares):
        with pytest.raises(LoadRetracted, match="rank 3"):
            missing(lease_of(probe).landings, 1)
    assert missing(lease_of(other).landings, 3) is None


def test_a_lease_that_is_granted_after_the_step_has_told_is_void_from_its_beginning() -> None:
    rig = opened()
    probe = rig.acquire()
    rig.advance()
    rig.answer((3, RETRACTED), (2, loading(7)))
    with pytest.raises(LoadRetracted):
        missing(lease_of(probe).landings, 1)


def test_nothing_is_remembered_of_leases_that_were_released() -> None:
    rig = opened()
    rig.acquire()
    rig.answer((2, loading(7)))
    rig.ask(Release(7))
    rig.advance()
    rig.answer((4, RETRACTED))
    later = rig.acquire()
    rig.answer((5, acquired(7, device_pages=2)))
    assert missing(lease_of(later).landings, 3) is None


async def test_whoever_awaits_a_lease_or_a_load_back_is_told_at_once(address: str) -> None:
    async with fake_worker(address) as fake, kvcoord.connect(address) as cache:
        acquiring = asyncio.ensure_future(cache.acquire([A, B], landed=False))
        fake.answer(((await fake.expect(Acquire))[0], loading(7)))
        lease = await acquiring
        loading_back = asyncio.ensure_future(cache.load_back([A, B], [1, 2]))
        answer = Loaded(committed("load-back/8/0"), "load-back/8/0", 2)
        fake.answer(((await fake.expect(LoadBack))[0], answer))
        load = await loading_back
        waiting = [asyncio.ensure_future(lease.landed()), asyncio.ensure_future(load.layer(0))]
        advancing = asyncio.ensure_future(cache.advance(1))
        told = [(f"load-back/{number}/0", Reason.COPY_FAILED, 2) for number in (7, 8)]
        fake.answer(((await fake.expect(Advance))[0], Advanced(1, 0, [], [], told, 0, [7])))
        assert (await advancing).broken == [7]
        for wait, number in zip(waiting, (7, 8), strict=True):
            with pytest.raises(LoadRetracted, match=f"load-back/{number}/0"):
                await wait
        releasing = asyncio.ensure_future(lease.release())
        fake.answer(((await fake.expect(Release))[0], Done()))
        await releasing


def test_the_blocking_client_raises_it_too(address: str) -> None:
    def script(engine: Engine) -> None:
        engine.open()
        engine.answer((engine.expect(Acquire)[0], loading(7)))
        engine.landed("load-back/7/0", 3)
        engine.answer((engine.expect(Advance)[0], RETRACTED))
        engine.answer((engine.expect(Release)[0], Done()))

    with scripted(address, script), kvcoord.connect_blocking(address) as cache:
        lease = cache.acquire([A, B], landed=False)
        lease.landed()
        cache.advance(1)
        with pytest.raises(LoadRetracted, match="copy_failed on rank 3"):
            lease.landed()
        lease.release()


def test_without_lockstep_no_step_tells_and_nothing_is_kept() -> None:
    rig = Rig()
    rig.ask(Open(1), reading.read_opened)
    rig.answer((1, msgspec.structs.replace(INFO, lockstep=False)))
    for number in range(2, 100):
        rig.load_back()
        rig.answer((number, Loaded(committed(f"l{number}"), f"l{number}", 1)))
    assert not rig.session._retractions._loads
