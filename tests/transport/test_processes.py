"""Peers in other processes that are killed, stopped, or end right after their last message."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvcoord.errors import DeadlineExceeded
from kvcoord.transport.blocking import BlockingUnixConnection
from kvcoord.transport.link import LinkLimits, SendResult
from tests.transport.endpoints import KINDS as ALL_KINDS
from tests.transport.endpoints import Kind, send_until

ROOT = Path(__file__).parents[2]
KINDS = ["zeromq-ipc", "zeromq-tcp", "unix", "node"]
LIMITS = LinkLimits(queue_messages_max=4)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Kind:
    return ALL_KINDS[request.param](tmp_path, port)


@asynccontextmanager
async def child(role: str, kind: Kind, address: str) -> AsyncIterator[Process]:
    family = kind.name if kind.name in ("unix", "node") else "zeromq"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.transport.peer_process", role, family, address, cwd=ROOT, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def fill(connection: BlockingUnixConnection) -> None:
    for _ in range(100):
        connection.send(bytes(1 << 20))


async def first_line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_a_killed_peer_becomes_unreachable_and_its_successor_is_served(kind: Kind) -> None:
    async with kind.serve(LIMITS) as served:
        async with child("connect", kind, served.listener.address) as process:
            peer, _ = await served.messages.get()
            process.kill()
            await process.wait()
            await send_until(partial(served.listener.send, peer, b"x"), SendResult.UNREACHABLE)
        async with child("connect", kind, served.listener.address) as process:
            peer, payload = await served.messages.get()
            assert payload == b"hello"
            assert served.listener.send(peer, b"welcome back") is SendResult.SENT
            assert await first_line(process) == "heard b'welcome back'"


async def test_a_killed_listener_is_lost_and_its_socket_file_does_not_block_the_next(kind: Kind) -> None:
    async with child("serve", kind, kind.address) as process:
        address = await first_line(process)
        async with kind.connect(address, LIMITS) as connected:
            await connected.arrivals.get()
            process.kill()
            await connected.losses.get()
            assert connected.connection.send(b"x") is SendResult.UNREACHABLE
    async with kind.serve(LIMITS, address) as served, kind.connect(address, LIMITS) as connected:
        await connected.arrivals.get()
        connected.connection.send(b"to the next one")
        assert await served.payloads(1) == [b"to the next one"]


async def test_a_connection_to_a_stopped_listener_fills_up_and_closes_within_its_linger_time(kind: Kind) -> None:
    async with child("serve", kind, kind.address) as process:
        address = await first_line(process)
        async with kind.connect(address, LIMITS) as connected:
            await connected.arrivals.get()
            process.send_signal(signal.SIGSTOP)
            await send_until(partial(connected.connection.send, bytes(1 << 20)), SendResult.FULL)
            await connected.connection.close(linger_s=0.05)
            process.send_signal(signal.SIGCONT)


async def test_a_listener_with_a_stopped_peer_closes_within_its_linger_time(kind: Kind) -> None:
    async with kind.serve(LIMITS) as served, child("connect", kind, served.listener.address) as process:
        peer, _ = await served.messages.get()
        process.send_signal(signal.SIGSTOP)
        await send_until(partial(served.listener.send, peer, bytes(1 << 20)), SendResult.FULL)
        await served.listener.close(linger_s=0.05)
        process.send_signal(signal.SIGCONT)


async def test_the_last_message_of_a_process_that_ends_arrives(kind: Kind) -> None:
    async with kind.serve() as served, child("leave", kind, served.listener.address) as process:
        assert await served.payloads(1) == [b"leaving"]
        assert await process.wait() == 0


async def test_a_blocking_send_to_a_stopped_listener_ends_at_its_limit(tmp_path: Path, port: int) -> None:
    kind = ALL_KINDS["unix"](tmp_path, port)
    async with child("serve", kind, kind.address) as process:
        address = await first_line(process)
        connection = BlockingUnixConnection(address, LinkLimits(send_timeout_s=0.05))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="send_timeout_s"):
            fill(connection)
        assert not connection.connected
        process.send_signal(signal.SIGCONT)
