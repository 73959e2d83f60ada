"""Endpoints that remember what they were handed, so that tests wait for events and not for time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvcoord.transport.curve import generate_keys, load_client_keys, load_server_keys
from kvcoord.transport.link import Connection, LinkLimits, Listener, SendResult, Transport
from kvcoord.transport.loopback import LoopbackTransport
from kvcoord.transport.node import NodeTransport
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport

LIMITS = LinkLimits()


class Kind:
    """One implementation: how to reach it and what it promises beyond the contract."""

    def __init__(self, name: str, transport: Transport, address: str) -> None:
        self.name, self.transport, self.address = name, transport, address
        self.reconnects = name != "unix"
        self.names_lost_peers = name in ("unix", "node", "loopback")
        self.keeps_oversized_peers = name != "unix"

    @asynccontextmanager
    async def serve(self, limits: LinkLimits = LIMITS, address: str = "") -> AsyncIterator["Served"]:
        served = Served()
        served.listener = await self.transport.open_listener(
            address or self.address, on_batch=served.take, on_lost=served.lose, limits=limits
        )
        try:
            yield served
        finally:
            await served.listener.close(0)

    @asynccontextmanager
    async def connect(
        self, address: str, limits: LinkLimits = LIMITS, identity: bytes = b"rank-0"
    ) -> AsyncIterator["Connected"]:
        connected = Connected()
        connected.connection = await self.transport.open_connection(
            address,
            identity,
            on_batch=connected.take,
            on_connected=lambda: connected.arrivals.put_nowait(None),
            on_lost=connected.losses.put_nowait,
            limits=limits,
        )
        try:
            yield connected
        finally:
            await connected.connection.close(0)

    @asynccontextmanager
    async def pair(
        self, listener_limits: LinkLimits = LIMITS, connection_limits: LinkLimits = LIMITS
    ) -> AsyncIterator[tuple["Served", "Connected", bytes]]:
        """A listener and a connection to it that have spoken once, and the peer's name at the listener."""
        async with (
            self.serve(listener_limits) as served,
            self.connect(served.listener.address, connection_limits) as connected,
        ):
            await connected.connection.wait_connected()
            await connected.arrivals.get()
            yield served, connected, await introduce(served, connected)


class Served:
    """A listener's callbacks."""

    listener: Listener

    def __init__(self) -> None:
        self.batches: list[list[tuple[bytes, bytes]]] = []
        self.messages: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self.losses: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        self.reply: Callable[[bytes, bytes], None] | None = None

    def take(self, batch: list[tuple[bytes, bytes]]) -> None:
        self.batches.append(batch)
        for peer, payload in batch:
            if self.reply is not None:
                self.reply(peer, payload)
            self.messages.put_nowait((peer, payload))

    def lose(self, peer: bytes, cause: str) -> None:
        self.losses.put_nowait((peer, cause))

    async def payloads(self, count: int) -> list[bytes]:
        return [(await self.messages.get())[1] for _ in range(count)]


class Connected:
    """A connection's callbacks."""

    connection: Connection

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.arrivals: asyncio.Queue[None] = asyncio.Queue()
        self.losses: asyncio.Queue[str] = asyncio.Queue()
        self.reply: Callable[[bytes], None] | None = None

    def take(self, batch: list[bytes]) -> None:
        self.batches.append(batch)
        for payload in batch:
            if self.reply is not None:
                self.reply(payload)
            self.messages.put_nowait(payload)

    async def payloads(self, count: int) -> list[bytes]:
        return [await self.messages.get() for _ in range(count)]


async def introduce(served: Served, connected: Connected) -> bytes:
    """One message, so that the listener knows the peer by name."""
    assert connected.connection.send(b"hello") is SendResult.SENT
    peer, payload = await served.messages.get()
    assert payload == b"hello"
    return peer


async def send_when_room(send: Callable[[], SendResult]) -> None:
    """Send, giving the event loop turns while the queue is full."""
    while True:
        result = send()
        if result is not SendResult.FULL:
            break
        await asyncio.sleep(0)
    assert result is SendResult.SENT


async def send_until(send: Callable[[], SendResult], expected: SendResult) -> None:
    """Send until that is the answer, giving the event loop turns."""
    while True:
        if send() is expected:
            return
        await asyncio.sleep(0)


def _curve(folder: Path, port: int) -> Kind:
    generate_keys(folder / "keys")
    transport = ZeromqTransport(
        server_keys=load_server_keys(folder / "keys"), client_keys=load_client_keys(folder / "keys")
    )
    return Kind("zeromq-curve", transport, f"tcp://127.0.0.1:{port}")


KINDS: dict[str, Callable[[Path, int], Kind]] = {
    "zeromq-ipc": lambda folder, _: Kind("zeromq-ipc", ZeromqTransport(), f"ipc://{folder}/z"),
    "zeromq-tcp": lambda _, port: Kind("zeromq-tcp", ZeromqTransport(insecure_tcp=True), f"tcp://127.0.0.1:{port}"),
    "zeromq-curve": _curve,
    "unix": lambda folder, _: Kind("unix", UnixTransport(), f"unix://{folder}/u"),
    "node": lambda folder, _: Kind("node", NodeTransport(), f"unix://{folder}/n"),
    "loopback": lambda *_: Kind("loopback", LoopbackTransport(), "loopback://*"),
}
"""By a folder and a port that are the test's own."""
