"""What is particular to Unix streams, on the event loop and blocking."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcoord.errors import ConfigError, DeadlineExceeded, FrameOversized, PeerUnavailable
from kvcoord.transport.blocking import BlockingUnixConnection
from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.unix import UnixConnection, UnixTransport
from tests.transport.endpoints import LIMITS, Kind, Served

STRICT = LinkLimits(message_bytes_max=1000)


@pytest.fixture
def kind(tmp_path: Path) -> Kind:
    return Kind("unix", UnixTransport(), f"ipc://{tmp_path}/rank0.sock")


@asynccontextmanager
async def echo(kind: Kind, limits: LinkLimits = LIMITS) -> AsyncIterator[Served]:
    """A listener that sends everything back."""
    async with kind.serve(limits) as served:
        served.reply = lambda peer, payload: check(served.listener.send(peer, payload))

        def check(result: SendResult) -> None:
            assert result is SendResult.SENT

        yield served


@asynccontextmanager
async def raw(kind: Kind) -> AsyncIterator[socket.socket]:
    """A foreign client that writes whatever bytes it likes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.setblocking(False)
        await asyncio.get_running_loop().sock_connect(foreign, kind.address.removeprefix("ipc://"))
        yield foreign


async def speak_at_once(server: socket.socket) -> None:
    """Accept one connection, write a message to it before it can have asked for one, and close."""
    peer, _ = await asyncio.get_running_loop().sock_accept(server)
    peer.send(struct.pack("<I", 2) + b"hi")
    peer.close()


async def test_a_connection_that_never_started_closes_at_once(kind: Kind) -> None:
    async with kind.serve() as served:
        address = served.listener.address
    connection = UnixConnection(address, on_batch=print, on_connected=print, on_lost=print, limits=LIMITS)
    with pytest.raises(PeerUnavailable):
        await connection.start()
    await connection.close()


async def test_both_local_schemes_reach_the_same_listener(kind: Kind) -> None:
    async with kind.serve() as served, kind.connect(kind.address.replace("ipc://", "unix://")) as connected:
        connected.connection.send(b"hello")
        assert await served.payloads(1) == [b"hello"]


async def test_a_prefix_beyond_the_limit_ends_the_connection_after_the_messages_before_it(kind: Kind) -> None:
    async with kind.serve(STRICT) as served, raw(kind) as foreign:
        foreign.send(struct.pack("<I", 2) + b"ok" + struct.pack("<I", 1001) + b"never read")
        assert await served.payloads(1) == [b"ok"]
        _, cause = await served.losses.get()
        assert "message_bytes_max" in cause
        counts = served.listener.statistics()
        assert (counts.messages_oversized, counts.messages_malformed, counts.peers_connected) == (1, 0, 0)


async def test_a_truncated_message_is_dropped_and_counted(kind: Kind) -> None:
    async with kind.serve() as served:
        async with raw(kind) as foreign:
            foreign.send(struct.pack("<I", 10) + b"half")
        await served.losses.get()
        assert served.messages.empty()
        assert served.listener.statistics().messages_malformed == 1


async def test_a_message_sent_byte_by_byte_arrives_whole(kind: Kind) -> None:
    async with kind.serve() as served, raw(kind) as foreign:
        for byte in struct.pack("<I", 5) + b"hello" + struct.pack("<I", 0):
            foreign.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await served.payloads(2) == [b"hello", b""]


async def test_connections_beyond_the_limit_are_closed_and_counted(kind: Kind) -> None:
    async with kind.serve(LinkLimits(peers_max=1)) as served, kind.connect(kind.address) as first:
        first.connection.send(b"first")
        await served.payloads(1)
        async with kind.connect(kind.address) as second:
            await second.losses.get()
        assert served.listener.statistics().peers_refused == 1
        assert served.losses.empty()
        first.connection.send(b"unharmed")
        assert await served.payloads(1) == [b"unharmed"]


async def test_a_listener_does_not_remove_the_socket_file_of_its_successor(kind: Kind) -> None:
    path = kind.address.removeprefix("ipc://")
    async with kind.serve() as served:
        os.unlink(path)
        async with kind.serve() as successor:
            await served.listener.close()
            async with kind.connect(kind.address) as connected:
                connected.connection.send(b"hello")
                assert await successor.payloads(1) == [b"hello"]
    assert not os.access(path, os.F_OK)


async def test_what_arrives_before_the_opener_returns_is_kept_until_after_connected(kind: Kind) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(kind.address.removeprefix("ipc://"))
        server.listen()
        server.setblocking(False)
        speaking = asyncio.ensure_future(speak_at_once(server))
        order: list[str] = []
        lost = asyncio.Event()

        def on_lost(cause: str) -> None:
            order.append("lost")
            lost.set()

        connection = await UnixTransport().open_connection(
            kind.address,
            b"engine",
            on_batch=lambda batch: order.append("batch"),
            on_connected=lambda: order.append("connected"),
            on_lost=on_lost,
            limits=LIMITS,
        )
        assert order == []
        await speaking
        await lost.wait()
        assert order == ["connected", "batch", "lost"]
        await connection.close()


async def test_a_blocking_connection_asks_and_is_answered(kind: Kind) -> None:
    def ask(address: str) -> list[bytes]:
        connection = BlockingUnixConnection(address, LIMITS)
        answers = []
        for payload in (b"", b"x", bytes(300_000)):
            connection.send(payload)
            answers.append(connection.receive(timeout_s=10))
        connection.close()
        connection.close()
        return answers

    async with echo(kind):
        assert await asyncio.to_thread(ask, kind.address) == [b"", b"x", bytes(300_000)]


async def test_a_blocking_connection_keeps_messages_that_came_together(kind: Kind) -> None:
    def ask(address: str) -> list[bytes]:
        connection = BlockingUnixConnection(address, LIMITS)
        for number in range(500):
            connection.send(b"%d" % number)
        answers = [connection.receive(timeout_s=10) for _ in range(500)]
        counts = connection.statistics()
        assert (counts.messages_sent, counts.messages_received) == (500, 500)
        connection.close()
        return answers

    async with echo(kind):
        assert await asyncio.to_thread(ask, kind.address) == [b"%d" % number for number in range(500)]


async def test_a_blocking_receive_ends_at_its_deadline_and_loses_nothing(kind: Kind) -> None:
    async with kind.serve() as served:
        connection = BlockingUnixConnection(kind.address, LIMITS)
        for timeout_s in (0.0, 0.01):
            with pytest.raises(DeadlineExceeded):
                connection.receive(timeout_s)
        connection.send(b"hello")
        peer, _ = await served.messages.get()
        served.listener.send(peer, b"late")
        await served.listener.close()
        assert connection.receive(timeout_s=10) == b"late"
        with pytest.raises(PeerUnavailable, match="closed by the peer"):
            connection.receive(timeout_s=10)
        with pytest.raises(PeerUnavailable):
            connection.send(b"x")
        assert not connection.connected
        assert connection.statistics().peers_lost == 1


async def test_half_a_message_outlives_a_blocking_deadline(kind: Kind) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(kind.address.removeprefix("ipc://"))
        server.listen()
        connection = BlockingUnixConnection(kind.address, LIMITS)
        peer, _ = server.accept()
        peer.send(struct.pack("<I", 4) + b"ha")
        with pytest.raises(DeadlineExceeded):
            connection.receive(timeout_s=0.05)
        peer.send(b"lf")
        assert connection.receive(timeout_s=10) == b"half"
        peer.close()
        connection.close()


async def test_a_blocking_connection_refuses_messages_beyond_the_limit(kind: Kind) -> None:
    async with kind.serve() as served:
        connection = BlockingUnixConnection(kind.address, STRICT)
        with pytest.raises(FrameOversized):
            connection.send(bytes(1001))
        connection.send(b"hello")
        peer, _ = await served.messages.get()
        served.listener.send(peer, b"fits")
        served.listener.send(peer, bytes(1001))
        await served.listener.close()
        assert connection.receive(timeout_s=10) == b"fits"
        with pytest.raises(PeerUnavailable, match="message_bytes_max"):
            connection.receive(timeout_s=10)
        assert connection.statistics().messages_oversized == 1
        assert not connection.connected


async def test_nobody_to_block_on_is_said_at_once(kind: Kind) -> None:
    with pytest.raises(PeerUnavailable, match=kind.address):
        BlockingUnixConnection(kind.address, LIMITS)
    with pytest.raises(ConfigError):
        BlockingUnixConnection("tcp://127.0.0.1:1", LIMITS)
