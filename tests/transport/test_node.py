"""What is particular to node links: greeting and introduction, who reads, and what a message costs."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvcoord.errors import PeerUnavailable
from kvcoord.transport import node_listener
from kvcoord.transport.framing import prefix_length
from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.node import NodeTransport
from kvcoord.transport.node_connection import NodeConnection
from kvcoord.transport.node_listener import GREETING
from kvcoord.transport.unix import UnixTransport
from tests.leaks import grows, open_files
from tests.transport.endpoints import Connected, Kind, introduce

HASTY = LinkLimits(connect_timeout_s=0.05)


@pytest.fixture
def kind(tmp_path: Path) -> Kind:
    return Kind("node", NodeTransport(), f"unix://{tmp_path}/n")


@asynccontextmanager
async def stranger(kind: Kind) -> AsyncIterator[socket.socket]:
    """Somebody who connects without our code, and has read the greeting."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.setblocking(False)
        await loop.sock_connect(foreign, kind.address.removeprefix("unix://"))
        assert await loop.sock_recv(foreign, 1024) == prefix_length(GREETING)
        yield foreign


async def ended(foreign: socket.socket) -> None:
    assert await asyncio.get_running_loop().sock_recv(foreign, 1024) == b""


async def absent(connected: Connected, expected: str) -> None:
    """Return when an attempt to connect has failed for this cause. Others may have been too slow to show it."""
    cause = ""
    while expected not in cause:
        with pytest.raises(PeerUnavailable) as raised:
            await connected.connection.wait_connected()
        cause = raised.value.cause


def node(connected: Connected) -> NodeConnection:
    assert isinstance(connected.connection, NodeConnection)
    return connected.connection


@pytest.mark.parametrize(
    "introduction",
    [b"GET / HTTP/1.1", GREETING, GREETING + b"\0rank", GREETING + b"x" * 256, b"kvcoord node link 2rank"],
)
async def test_a_stranger_that_does_not_introduce_itself_is_refused_and_counted(
    kind: Kind, introduction: bytes
) -> None:
    async with kind.serve() as served, stranger(kind) as foreign:
        foreign.send(prefix_length(introduction) + prefix_length(b"a vote"))
        await ended(foreign)
        counts = served.listener.statistics()
        assert (counts.peers_refused, counts.peers_connected, counts.peers_lost) == (1, 0, 0)
        assert served.messages.empty()


async def test_a_stranger_that_says_nothing_is_let_go_when_its_time_is_over(kind: Kind) -> None:
    async with kind.serve(HASTY) as served, stranger(kind) as foreign:
        await ended(foreign)
        assert served.listener.statistics().peers_refused == 1


async def test_a_listener_that_stands_still_is_not_taken_for_one_that_serves(kind: Kind) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(kind.address.removeprefix("unix://"))
        mute.listen()
        async with kind.connect(kind.address, HASTY) as connected:
            await absent(connected, "does not greet")
            assert connected.connection.send(b"vote") is SendResult.UNREACHABLE


async def test_a_worker_is_not_taken_for_a_coordinator(kind: Kind) -> None:
    worker = Kind("unix", UnixTransport(), kind.address)
    async with worker.serve() as served:
        served.reply = lambda peer, payload: check(served.listener.send(peer, b"no such call"))

        def check(result: SendResult) -> None:
            assert result is SendResult.SENT

        async with kind.connect(kind.address, HASTY) as connected:
            await absent(connected, "no coordinator of this version")


async def test_a_second_connection_takes_over_an_identity_after_what_the_first_has_said(kind: Kind) -> None:
    async with kind.serve() as served, kind.connect(kind.address) as old:
        await old.connection.wait_connected()
        await introduce(served, old)
        heard: list[tuple[bytes, int]] = []
        served.reply = lambda peer, payload: heard.append((payload, served.losses.qsize()))
        old.connection.send(b"last words")
        async with kind.connect(kind.address) as new:
            await new.connection.wait_connected()
            new.connection.send(b"first words")
            await served.payloads(2)
            assert served.listener.send(b"rank-0", b"for the new one") is SendResult.SENT
            assert await new.payloads(1) == [b"for the new one"]
            assert old.messages.empty()
            await old.losses.get()
    assert heard[:2] == [(b"last words", 0), (b"first words", 1)]


async def test_a_message_far_beyond_the_limit_breaks_the_connection_and_the_peer_comes_back(kind: Kind) -> None:
    strict = LinkLimits(message_bytes_max=1000)
    async with kind.pair(strict) as (served, connected, _):
        connected.connection.send(bytes(4001))
        await connected.losses.get()
        await connected.arrivals.get()
        connected.connection.send(b"back")
        assert await served.payloads(1) == [b"back"]
        assert served.listener.statistics().messages_oversized == 1


async def test_what_all_peers_have_sent_is_one_batch_and_an_answer_to_all_is_framed_once(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    framed: list[bytes] = []

    def framing(payload: bytes) -> bytes:
        framed.append(payload)
        return prefix_length(payload)

    monkeypatch.setattr(node_listener, "prefix_length", framing)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(kind.serve())
        peers = [
            await stack.enter_async_context(kind.connect(kind.address, identity=b"rank-%d" % rank)) for rank in range(4)
        ]
        for peer in peers:
            await peer.connection.wait_connected()
            await introduce(served, peer)
        served.batches.clear()
        framed.clear()
        for peer in peers:
            peer.connection.send(b"vote")
        await served.payloads(4)
        assert [len(batch) for batch in served.batches] == [4]
        verdict = b"verdict"
        for rank in range(4):
            assert served.listener.send(b"rank-%d" % rank, verdict) is SendResult.SENT
        assert framed == [verdict]
        assert [await peer.payloads(1) for peer in peers] == [[verdict]] * 4


async def test_whoever_borrows_the_reading_end_is_handed_what_comes_on_its_own_thread(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        threads: list[int] = []
        connected.reply = lambda payload: threads.append(threading.get_ident())
        assert node(connected).borrow()
        assert not node(connected).borrow()
        served.listener.send(peer, b"for the borrower")
        assert await asyncio.to_thread(node(connected).pump, 30.0)
        assert threads
        assert threads[0] != threading.get_ident()
        node(connected).give_back()
        served.listener.send(peer, b"for the loop")
        assert await connected.payloads(2) == [b"for the borrower", b"for the loop"]
        assert threads[1] == threading.get_ident()


async def test_a_borrower_is_woken_when_the_connection_closes_or_is_interrupted(kind: Kind) -> None:
    async with kind.pair() as (_, connected, _):
        assert node(connected).borrow()
        waiting = asyncio.ensure_future(asyncio.to_thread(node(connected).pump, 30.0))
        await asyncio.sleep(0)
        node(connected).interrupt()
        assert not await waiting
        node(connected).give_back()
        await connected.losses.get()
        await connected.arrivals.get()
        assert node(connected).borrow()
        waiting = asyncio.ensure_future(asyncio.to_thread(node(connected).pump, 30.0))
        await connected.connection.close()
        assert not await waiting
        node(connected).give_back()


async def test_a_borrower_whose_time_is_over_keeps_the_connection(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        assert node(connected).borrow()
        assert await asyncio.to_thread(node(connected).pump, 0.01)
        assert await asyncio.to_thread(node(connected).pump, 0.0)
        node(connected).give_back()
        served.listener.send(peer, b"still there")
        assert await connected.payloads(1) == [b"still there"]


async def test_endpoints_leave_no_descriptor_and_no_socket_file_behind(kind: Kind) -> None:
    files = []
    for _ in range(8):
        async with kind.pair():
            pass
        files.append(len(open_files()))
    assert not grows(files)
    assert not os.access(kind.address.removeprefix("unix://"), os.F_OK)
