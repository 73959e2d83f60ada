"""The async client when callers are cancelled, the worker dies, time runs out, or the socket is full."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kvcoord
from kvcoord.client import CacheClient, reading
from kvcoord.client.channel import Channel
from kvcoord.client.options import ClientOptions
from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import (
    Acquire,
    Advance,
    Advanced,
    Allocate,
    Allocated,
    Answers,
    Done,
    Failed,
    Free,
    FromEngine,
    LoadBack,
    Loaded,
    Match,
    Matched,
    Release,
    WriteThrough,
    Written,
)
from kvcoord.transport.framing import MessageSplitter
from tests.client.fake import FakeWorker, fake_worker
from tests.client.test_cache import leased, turns
from tests.client.values import A, B, acquired, committed


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def still_works(cache: CacheClient, worker: FakeWorker) -> None:
    task = asyncio.create_task(cache.match([B]))
    number, _ = await worker.expect(Match)
    worker.answer((number, Matched(2, 0)))
    assert (await task).pages == 2


# --- cancellation -----------------------------------------------------------------------------------------------------


async def test_a_caller_cancelled_before_it_could_ask_has_asked_nothing(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        await cancelled(asyncio.create_task(cache.acquire([A])))
        await still_works(cache, worker)
        assert worker.messages == [[Match(B)]]


async def test_a_caller_cancelled_before_the_call_was_sent_gets_its_lease_given_back(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.acquire([A]))
        await asyncio.sleep(0)
        await cancelled(task)
        number, _ = await worker.expect(Acquire)
        worker.answer((number, acquired(7)))
        assert (await worker.expect(Release))[1] == Release(7)
        await still_works(cache, worker)


async def test_a_caller_cancelled_while_the_worker_decides_gets_its_lease_given_back(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.acquire([A]))
        number, _ = await worker.expect(Acquire)
        await cancelled(task)
        worker.answer((number, acquired(7)))
        released, release = await worker.expect(Release)
        assert release == Release(7)
        worker.answer((released, Failed("GroupLost", ["g", "gone", 1.0])))
        await still_works(cache, worker)


async def test_a_caller_cancelled_when_the_answer_is_there_but_not_taken_gets_its_lease_given_back(
    address: str,
) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        channel = cache._channel
        received = channel.session.receive
        task = asyncio.create_task(cache.acquire([A]))

        def receive_and_cancel(payload: bytes) -> None:
            received(payload)
            task.cancel()

        number, _ = await worker.expect(Acquire)
        channel.session.receive = receive_and_cancel  # type: ignore[method-assign]
        worker.answer((number, acquired(7)))
        with pytest.raises(asyncio.CancelledError):
            await task
        channel.session.receive = received  # type: ignore[method-assign]
        assert (await worker.expect(Release))[1] == Release(7)
        await still_works(cache, worker)


async def test_a_caller_cancelled_together_with_a_failure_leaves_nothing_behind(address: str) -> None:
    """An exception that is never fetched would be reported by the loop."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.acquire([A]))
        number, _ = await worker.expect(Acquire)
        channel = cache._channel
        channel.session.receive(encode(Answers([(number, Failed("GroupLost", ["g", "gone", 1.0]))])))
        await cancelled(task)
        del task
        gc.collect()
        await still_works(cache, worker)
    assert reported == []


async def test_slots_of_a_cancelled_allocation_are_freed(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.allocate(2))
        number, _ = await worker.expect(Allocate)
        await cancelled(task)
        worker.answer((number, Allocated(committed("allocate/1/0"), [[3, 4]])))
        assert (await worker.expect(Free))[1] == Free([[3, 4]])
        await still_works(cache, worker)


@pytest.mark.parametrize(
    ("ask", "kind", "answer"),
    [
        (lambda cache: cache.match([A]), Match, Matched(1, 0)),
        (lambda cache: cache.advance(1), Advance, Advanced(1, 0, [], [], [], 0)),
        (lambda cache: cache.write_through([A], [1]), WriteThrough, Written(None, "write-through/1/0", 1)),
        (lambda cache: cache.load_back([A], [1]), LoadBack, Loaded(committed("load-back/1/0"), "load-back/1/0", 1)),
    ],
    ids=["match", "advance", "write_through", "load_back"],
)
async def test_the_late_answer_to_a_cancelled_caller_is_dropped(
    address: str,
    ask: Callable[[CacheClient], Awaitable[object]],
    kind: type[Match],
    answer: Matched,
) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task: asyncio.Task[object] = asyncio.ensure_future(ask(cache))
        number, _ = await worker.expect(kind)
        await cancelled(task)
        worker.answer((number, answer))
        await still_works(cache, worker)
        assert worker.messages[1:] == [[Match(B)]]


async def test_cancelling_who_waits_for_a_layer_or_an_outcome_changes_nothing(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7, host_pages=1, loaded=[(0, 1)]))
        writing = asyncio.create_task(cache.write_through([A], [1], deferred=True))
        number, _ = await worker.expect(WriteThrough)
        worker.answer((number, Written(None, "write-through/4/0", 1)))
        pending = await writing
        waiters = [asyncio.ensure_future(lease.landed()), asyncio.ensure_future(pending)]
        await turns()
        for waiter in waiters:
            await cancelled(waiter)
        advancing = asyncio.create_task(cache.advance(1))
        number, _ = await worker.expect(Advance)
        worker.landed("load-back/7/0", 3)
        worker.answer((number, Advanced(1, 0, [committed("write-through/4/0")], [], [], 0)))
        await advancing
        await lease.landed()
        assert await pending
        lease.released = True


async def test_a_lease_is_released_though_the_caller_is_cancelled_in_its_block(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        holding = asyncio.Event()

        async def hold() -> None:
            async with await cache.acquire([A]):
                holding.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        worker.answer(((await worker.expect(Acquire))[0], acquired(7)))
        await holding.wait()
        task.cancel()
        number, _ = await worker.expect(Release)
        worker.answer((number, Done()))
        with pytest.raises(asyncio.CancelledError):
            await task


# --- the worker is gone -----------------------------------------------------------------------------------------------


async def test_a_killed_worker_fails_all_that_waits_and_all_that_comes(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7, host_pages=1, loaded=[(0, 1)]))
        writing = asyncio.create_task(cache.write_through([A], [1], deferred=True))
        number, _ = await worker.expect(WriteThrough)
        worker.answer((number, Written(None, "write-through/4/0", 1)))
        pending = await writing
        waiting: list[asyncio.Future[Any]]
        waiting = [asyncio.create_task(cache.match([A])), asyncio.ensure_future(pending)]
        waiting += [asyncio.create_task(lease.landed()), asyncio.create_task(cache.advance(1))]
        await worker.expect(Match)
        await worker.kill()
        for waiter in waiting:
            with pytest.raises(PeerUnavailable, match="closed by the peer"):
                await waiter
        assert cache.closed
        with pytest.raises(PeerUnavailable, match="closed by the peer"):
            await cache.match([A])
        with pytest.raises(PeerUnavailable):
            await lease.release()


async def test_an_error_in_the_block_of_a_lease_is_not_hidden_by_the_end_of_the_worker(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        lease = await leased(cache, worker, acquired(7))

        async def fail() -> None:
            async with lease:
                await worker.kill()
                with contextlib.suppress(PeerUnavailable):
                    await cache.match([A])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()


async def test_a_worker_that_makes_no_sense_ends_the_session(address: str) -> None:
    async with fake_worker(address) as worker, kvcoord.connect(address) as cache:
        task = asyncio.create_task(cache.match([A]))
        await worker.expect(Match)
        worker.send(b"\x01garbage")
        with pytest.raises(PeerUnavailable, match="does not speak the protocol"):
            await task
        assert cache.closed


async def test_what_was_asked_before_closing_is_still_sent(address: str) -> None:
    async with fake_worker(address) as worker:
        async with kvcoord.connect(address) as cache:
            task = asyncio.create_task(cache.match([A]))
            await asyncio.sleep(0)
        assert (await worker.expect(Match))[1] == Match(A)
        with pytest.raises(PeerUnavailable, match="this client is closed"):
            await task


# --- time and room ----------------------------------------------------------------------------------------------------


async def test_a_call_without_an_answer_fails_at_its_deadline_and_what_comes_late_is_given_back(address: str) -> None:
    async with fake_worker(address) as worker:
        channel = Channel(address, ClientOptions(call_timeout_s=0.02))
        await channel.open()
        with pytest.raises(DeadlineExceeded, match=r"no answer to allocate within call_timeout_s=0\.02 s"):
            await channel.ask(Allocate(2), reading.read_allocation)
        with pytest.raises(DeadlineExceeded, match="no answer to match"):
            await channel.ask(Match(A), reading.read_match)
        number, _ = await worker.expect(Allocate)
        await worker.expect(Match)
        worker.answer((number, Allocated(committed("allocate/1/0"), [[3, 4]])))
        assert (await worker.expect(Free))[1] == Free([[3, 4]])
        await channel.close()


async def test_a_call_that_is_asked_later_has_a_deadline_of_its_own(address: str) -> None:
    async with fake_worker(address):
        channel = Channel(address, ClientOptions(call_timeout_s=0.02))
        await channel.open()
        loop = asyncio.get_running_loop()
        later: asyncio.Future[asyncio.Task[Any]] = loop.create_future()

        def ask_later() -> None:
            later.set_result(asyncio.create_task(channel.ask(Match(B), reading.read_match)))

        loop.call_later(0.01, ask_later)
        with pytest.raises(DeadlineExceeded):
            await channel.ask(Match(A), reading.read_match)
        with pytest.raises(DeadlineExceeded):
            await (await later)
        await channel.close()


async def test_calls_wait_for_room_in_a_full_socket_and_keep_their_order(address: str) -> None:
    loop = asyncio.get_running_loop()
    calls_max = 200
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.setblocking(False)
        server.bind(address.removeprefix("ipc://"))
        server.listen()
        channel = Channel(address, ClientOptions(message_bytes_max=1 << 16))
        accepting = asyncio.ensure_future(loop.sock_accept(server))
        await channel.open()
        peer, _ = await accepting
        asked = []
        for number in range(1, calls_max + 1):
            asked.append(asyncio.create_task(channel.ask(Match(bytes([number]) * 48_000), reading.read_match)))
            await turns()
        assert channel._connection is not None
        assert channel._connection.statistics().sends_full
        splitter, decoder = MessageSplitter(1 << 16), Decoder[FromEngine](FromEngine)
        numbers: list[int] = []
        while len(numbers) < calls_max:
            for payload in splitter.feed(await loop.sock_recv(peer, 1 << 20)):
                numbers += [call.keys[0] for _, call in decoder.decode(payload).calls if isinstance(call, Match)]
        assert numbers == list(range(1, calls_max + 1))
        peer.close()
        for task in asked:
            with pytest.raises(PeerUnavailable):
                await task
        await channel.close()
