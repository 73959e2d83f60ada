"""The async client against a worker that answers what the test says."""

import asyncio
from typing import Any

import msgspec
import pytest

import kvcoord
from kvcoord.client import CacheClient, Pending
from kvcoord.client.awaitable import landed
from kvcoord.domain import Agreement, Reason, Tier
from kvcoord.errors import ConfigError, DeadlineExceeded, GroupLost, PeerUnavailable, TransferFailed, UsageError
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol import local
from kvcoord.protocol.local import (
    Acquire,
    Advance,
    Advanced,
    Agree,
    Agreed,
    Allocate,
    Allocated,
    Answer,
    Done,
    Evict,
    Evicted,
    Failed,
    Free,
    LoadBack,
    Loaded,
    Match,
    Matched,
    Outcome,
    Release,
    Status,
    StatusBody,
    WriteThrough,
    Written,
)
from tests.client.fake import FakeWorker, fake_worker
from tests.client.values import INFO, A, B, C, aborted, acquired, committed


async def turns(count: int = 3) -> None:
    """Let the tasks that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def leased(cache: CacheClient, worker: FakeWorker, answer: local.Acquired, *, landed: bool = False) -> Any:
    task = asyncio.create_task(cache.acquire([A, B, C], landed=landed))
    number, _ = await worker.expect(Acquire)
    worker.answer((number, answer))
    return await task


# --- the session ------------------------------------------------------------------------------------------------------


async def test_a_session_opens_with_the_groups_geometry_and_closes(address: str) -> None:
    async with fake_worker(address) as worker:
        async with kvcoord.connect(address) as cache:
            assert cache.info == INFO
            session = cache._channel.session
            assert not session.lost
        assert cache.closed
        await worker.lost.get()
        with pytest.raises(PeerUnavailable, match="this client is closed"):
            await cache.match([A])
        await cache.close()


async def test_nobody_at_the_address_is_said_at_once(address: str) -> None:
    with pytest.raises(PeerUnavailable, match=address):
        async with kvcoord.connect(address):
            pass


@pytest.mark.parametrize(
    "options",
    [{"call_timeout_s": 0.0}, {"connect_timeout_s": 0.0}, {"message_bytes_max": 0}, {"calls_open_max": 0}],
    ids=str,
)
async def test_limits_that_cannot_be_are_refused_by_name(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        async with kvcoord.connect(address, **options):
            pass
    assert caught.value.field in options


async def test_a_worker_of_another_release_is_told_by_name(address: str) -> None:
    async with fake_worker(address, Failed("UsageError", ["version", 1, "use the same release"])) as worker:
        with pytest.raises(UsageError, match="use the same release"):
            async with kvcoord.connect(address):
                pass
        await worker.lost.get()


async def test_a_worker_that_never_answers_is_given_up(address: str) -> None:
    async with fake_worker(address, None) as worker:
        with pytest.raises(DeadlineExceeded, match=r"no answer to open within call_timeout_s=0\.02 s"):
            async with kvcoord.connect(address, call_timeout_s=0.02):
                pass
        await worker.lost.get()


# --- calls and answers ------------------------------------------------------------------------------------------------


async def test_each_call_travels_as_it_was_asked_and_returns_what_was_answered(address: str) -> None:
    snapshot = WorkerSnapshot(version="1", incarnation="i", uptime_s=1.0, ready=True, group="g", rank=1, state="active")
    verdict = Advanced(5, 4, [], ["load-back/1/0"], [("write-through/1/0", Reason.COPY_FAILED, 2)], 3)
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        asked = asyncio.gather(
            cache.match([A, B]),
            cache.allocate(2),
            cache.free([4, 5]),
            cache.write_through([A, B], [7], operation="op"),
            cache.load_back([A], [3]),
        )
        asked_too = asyncio.gather(
            cache.advance(5),
            cache.evict("host", 9),
            cache.agree("batch/1", True, agreement="min", value=4, participants=[0, 1]),
            cache.status(),
        )
        numbers = [(await worker.expect(kind))[0] for kind in (Match, Allocate, Free, WriteThrough, LoadBack, Advance)]
        numbers += [(await worker.expect(Evict))[0], (await worker.expect(Agree))[0], (await worker.expect(Status))[0]]
        answers: list[Answer] = [
            Matched(1, 2),
            Allocated(committed("allocate/1/0"), [[8, 9]]),
            Done(),
            Written(aborted("write-through/2/0"), "write-through/2/0", 1),
            Loaded(committed("load-back/3/0"), "load-back/3/0", 0),
            verdict,
            Evicted(6),
            Agreed(committed("batch/1")),
            StatusBody(msgspec.json.encode(snapshot)),
        ]
        worker.answer(*zip(numbers, answers, strict=True))
        match, allocation, freed, outcome, load = await asked
        advanced, evicted, agreed, status = await asked_too
    assert worker.messages == [
        [
            Match(A + B),
            Allocate(2),
            Free([[4, 5]]),
            WriteThrough(A + B, [[7]], 0, "op"),
            LoadBack(A, [[3]]),
            Advance(5),
            Evict(Tier.HOST, 9),
            Agree("batch/1", True, Agreement.MIN, 0b11, 4),
            Status(),
        ]
    ]
    assert (match.device_pages, match.host_pages, match.pages) == (1, 2, 3)
    assert allocation
    assert allocation.slots == [[8, 9]]
    assert freed is None
    assert not outcome
    assert outcome == aborted("write-through/2/0")
    assert load
    assert load.pages == 0
    await load
    assert advanced == verdict
    assert evicted == 6
    assert agreed == committed("batch/1")
    assert status == snapshot


async def test_calls_of_one_turn_are_one_message_and_later_ones_another(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        first = [asyncio.create_task(cache.match([key])) for key in (A, B, C)]
        await turns()
        second = asyncio.create_task(cache.match([A, B]))
        numbers = [(await worker.expect(Match))[0] for _ in range(4)]
        assert worker.messages == [[Match(A), Match(B), Match(C)], [Match(A + B)]]
        for number in reversed(numbers):
            worker.answer((number, Matched(number, 0)))
        found = [await task for task in (*first, second)]
        assert [match.device_pages for match in found] == numbers


async def test_bad_arguments_are_refused_before_anything_is_sent(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        for bad in (
            cache.match([]),
            cache.acquire([b"short"]),
            cache.allocate(-1),
            cache.free([99]),
            cache.write_through([A], [1, 2]),
            cache.load_back([A], [[1], [2]]),
            cache.advance(-1),
            cache.evict("disk", 1),
            cache.evict("host", -1),
            cache.agree("", True),
        ):
            with pytest.raises(UsageError):
                await bad
        task = asyncio.create_task(cache.match([A]))
        number, _ = await worker.expect(Match)
        worker.answer((number, Matched(0, 0)))
        await task
        assert worker.messages == [[Match(A)]]


async def test_a_failure_is_raised_to_its_caller_and_to_nobody_else(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lost, fine = asyncio.create_task(cache.advance(1)), asyncio.create_task(cache.match([A]))
        first, second = (await worker.expect(Advance))[0], (await worker.expect(Match))[0]
        worker.answer((second, Matched(1, 0)), (first, Failed("GroupLost", ["g", "rank 2 is missing", 60.0])))
        with pytest.raises(GroupLost, match="rank 2 is missing"):
            await lost
        assert (await fine).pages == 1


# --- leases and loads -------------------------------------------------------------------------------------------------


async def test_a_lease_is_read_layer_by_layer_written_and_released(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7, device_pages=1, host_pages=1, loaded=[(1, 1)]))
        async with lease:
            assert lease
            assert (lease.number, lease.slots, lease.loaded) == (7, [[4, 5, 6]], [(1, 1)])
            second = asyncio.create_task(lease.layer(1))
            worker.landed("load-back/7/0", 1)
            await lease.layer(0)
            assert not second.done()
            worker.landed("load-back/7/0", 2)
            await second
            worker.landed("load-back/7/0", 3)
            await lease.landed()
            writing = asyncio.create_task(lease.write_through())
            number, call = await worker.expect(WriteThrough)
            assert call == WriteThrough(lease=7)
            worker.answer((number, Written(committed("write-through/8/0"), "write-through/8/0", 1)))
            assert await writing == committed("write-through/8/0")
            releasing = asyncio.create_task(lease.release())
            number, release = await worker.expect(Release)
            assert release == Release(7)
            worker.answer((number, Done()))
            await releasing
        assert [call for calls in worker.messages for call in calls].count(Release(7)) == 1
        with pytest.raises(UsageError, match="not held"):
            await lease.write_through()


async def test_leaving_the_block_of_a_lease_releases_it_whatever_happened(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:

        async def serve() -> None:
            async with await cache.acquire([A]):
                raise ZeroDivisionError

        task = asyncio.create_task(serve())
        worker.answer(((await worker.expect(Acquire))[0], acquired(7)))
        number, _ = await worker.expect(Release)
        worker.answer((number, Done()))
        with pytest.raises(ZeroDivisionError):
            await task


async def test_an_aborted_lease_says_what_was_cached_and_holds_nothing(address: str) -> None:
    answer = local.Acquired(aborted("allocate/7/0", Reason.DEVICE_FULL), 0, 1, 1, [], [], "allocate/7/0")
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        async with await leased(cache, worker, answer) as lease:
            assert not lease
            assert (lease.outcome.reason, lease.device_pages, lease.host_pages) == (Reason.DEVICE_FULL, 1, 1)
            with pytest.raises(UsageError, match="aborted"):
                await lease.landed()
        assert worker.messages == [[Acquire(A + B + C, False)]]


async def test_a_load_back_is_awaited_whole_or_by_layer_and_fails_at_its_layer(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.load_back([A, B], [1, 2]))
        number, _ = await worker.expect(LoadBack)
        worker.answer((number, Loaded(committed("load-back/3/0"), "load-back/3/0", 2)))
        load = await task
        whole = asyncio.ensure_future(load)
        worker.landed("load-back/3/0", 1)
        await load.layer(0)
        assert not whole.done()
        worker.landed("load-back/3/0", 1, "boom")
        with pytest.raises(TransferFailed, match="layer 1: boom"):
            await whole
        with pytest.raises(TransferFailed):
            await load.layer(1)
        await load.layer(0)
        assert load.error == "boom"


async def test_a_lease_that_is_dropped_without_a_release_is_warned_about(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7))
        with pytest.warns(ResourceWarning, match="dropped before it was released"):  # noqa: PT031
            del lease
            await turns()


# --- outcomes of a later round ----------------------------------------------------------------------------------------


async def test_a_deferred_write_is_resolved_by_a_later_advance(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        writing = asyncio.create_task(cache.write_through([A], [1], deferred=True))
        number, call = await worker.expect(WriteThrough)
        assert call.deferred
        worker.answer((number, Written(None, "write-through/4/0", 1)))
        pending = await writing
        assert isinstance(pending, Pending)
        assert not pending.done()
        waiting = asyncio.ensure_future(pending)
        advancing = asyncio.create_task(cache.advance(2))
        number, _ = await worker.expect(Advance)
        assert not waiting.done()
        worker.answer((number, Advanced(2, 1, [committed("write-through/4/1")], [], [], 1)))
        await advancing
        assert await waiting == committed("write-through/4/1")
        assert await pending == committed("write-through/4/1")


async def test_what_is_put_off_though_not_deferred_is_waited_for(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        writing = asyncio.create_task(cache.write_through([A], [1]))
        voting = asyncio.create_task(cache.agree("batch/1", False, reason=Reason.BUSY))
        first, second = (await worker.expect(WriteThrough))[0], (await worker.expect(Agree))[0]
        worker.answer((first, Written(None, "write-through/4/0", 1)), (second, Agreed(None)))
        advancing = asyncio.create_task(cache.advance(2))
        number, _ = await worker.expect(Advance)
        assert not writing.done()
        assert not voting.done()
        outcomes: list[Outcome] = [aborted("batch/1", Reason.BUSY), committed("write-through/4/0")]
        worker.answer((number, Advanced(2, 1, outcomes, [], [], 1)))
        await advancing
        assert [await voting, await writing] == outcomes


async def test_waits_for_outcomes_and_layers_are_bounded(address: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"outcome of write-through/4/0 within call_timeout_s=0\.01 s"):
        await Pending("write-through/4/0", None, 0.01)
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7, host_pages=1, loaded=[(0, 1)]))
        with pytest.raises(DeadlineExceeded, match="copy of load-back/7/0"):
            await landed(lease, None, 0.01)
        lease.released = True
