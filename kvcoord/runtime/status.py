"""Ask a running coordinator or worker for its status, wherever it listens. Changes nothing there.

http://host:port           the HTTP port of either, or host:port
tcp://host:port            a coordinator
unix:///path, ipc:///path  a coordinator, or a worker: a coordinator opens the conversation, with one of two greetings
"""

import asyncio
import os
from typing import Final

import h11
import msgspec

from kvcoord.errors import ConfigError, DeadlineExceeded, FrameError, PeerUnavailable
from kvcoord.observability.snapshot import Snapshot
from kvcoord.protocol.codec import Decoder, coordinator_decoder, encode
from kvcoord.protocol.local import Answers, Calls, FromWorker, Status, StatusBody
from kvcoord.protocol.messages import StatusReply, StatusRequest
from kvcoord.transport.address import parse_socket_path
from kvcoord.transport.curve import load_client_keys
from kvcoord.transport.link import Connection, LinkLimits, SendResult, Transport
from kvcoord.transport.node import NodeTransport
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport

_GREETING_WAIT_S: Final = 0.2
"""Coordinators greet at once; a worker waits to be spoken to."""

_ZEROMQ_GREETING: Final = b"\xff"
"""A node link greets with a message, which begins with its length."""

_READ_BYTES: Final = 64 << 10
_SNAPSHOT: Final[msgspec.json.Decoder[Snapshot]] = msgspec.json.Decoder(Snapshot)


async def ask(
    address: str, timeout_s: float, *, curve_keys_dir: str | None = None, insecure_tcp: bool = False
) -> Snapshot:
    """The status of whoever serves at `address`.

    Raises ConfigError for an address of another form, PeerUnavailable when nobody (or somebody else) answers there,
    DeadlineExceeded after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if address.startswith("tcp://"):
                keys = None if curve_keys_dir is None else load_client_keys(curve_keys_dir)
                body = await _ask_coordinator(address, ZeromqTransport(client_keys=keys, insecure_tcp=insecure_tcp))
            elif address.startswith(("ipc://", "unix://")):
                body = await _ask_local(address)
            else:
                body = await get(address, "/status")
    except TimeoutError as error:
        raise DeadlineExceeded(f"status from {address}", "timeout", timeout_s) from error
    try:
        return _SNAPSHOT.decode(body)
    except msgspec.DecodeError as error:
        raise PeerUnavailable(address, f"what answers there is no status of this version: {error}") from error


async def _ask_local(address: str) -> bytes:
    """Asks whoever it is as soon as that shows: by a greeting, or by an answer to what only workers understand."""
    try:
        reader, writer = await asyncio.open_unix_connection(parse_socket_path(address))
    except OSError as error:
        raise _unreachable(address, error) from error
    greeting = asyncio.ensure_future(_first_byte(reader))
    try:
        await asyncio.wait({greeting}, timeout=_GREETING_WAIT_S)
        body = None if _greeted(greeting) else await _ask_silent(address, greeting)
        if body is not None:
            return body
        transport = ZeromqTransport() if greeting.result() == _ZEROMQ_GREETING else NodeTransport()
        return await _ask_coordinator(address, transport)
    finally:
        greeting.cancel()
        writer.close()


async def _ask_silent(address: str, greeting: asyncio.Future[bytes]) -> bytes | None:
    """Asks who has not greeted as a worker. None: it has greeted after all, a coordinator that had stood still."""
    asking = asyncio.ensure_future(_ask_worker(address))
    try:
        await asyncio.wait({greeting, asking}, return_when=asyncio.FIRST_COMPLETED)
        return None if _greeted(greeting) else await asking
    except PeerUnavailable:
        # It greets before it refuses what only workers understand, so a greeting is on its way now or never.
        await asyncio.wait({greeting}, timeout=_GREETING_WAIT_S)
        if not _greeted(greeting):
            raise
        return None
    finally:
        asking.cancel()
        await asyncio.wait({asking})


def _greeted(greeting: asyncio.Future[bytes]) -> bool:
    return greeting.done() and bool(greeting.result())


async def _first_byte(reader: asyncio.StreamReader) -> bytes:
    """What the other end says by itself, empty when it has closed."""
    try:
        return await reader.read(1)
    except OSError:
        return b""


class _Answer:
    """One answer that is waited for, and whether the peer is there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connected = asyncio.Event()
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def settle(self, body: bytes) -> None:
        if not self.body.done():
            self.body.set_result(body)

    def lose(self, cause: str) -> None:
        if not self.body.done():
            self.body.set_exception(PeerUnavailable(self.address, cause))

    def forget(self) -> None:
        """Nobody waits any more: what has come, or has not, is of no interest."""
        if not self.body.cancel() and not self.body.cancelled():
            self.body.exception()


async def _ask_coordinator(address: str, transport: Transport) -> bytes:
    answer = _Answer(address)
    decoder = coordinator_decoder()
    nonce = int.from_bytes(os.urandom(6), "big")

    def take(batch: list[bytes]) -> None:
        for payload in batch:
            try:
                message = decoder.decode(payload)
            except FrameError as error:
                answer.lose(str(error))
                return
            if isinstance(message, StatusReply) and message.nonce == nonce:
                answer.settle(message.body)

    connection = await transport.open_connection(
        address,
        f"status/{os.getpid()}/{nonce:x}".encode(),
        on_batch=take,
        on_connected=answer.connected.set,
        on_lost=answer.lose,
        limits=LinkLimits(message_bytes_max=4 << 20),
    )
    return await _converse(connection, encode(StatusRequest(nonce)), answer)


async def _ask_worker(address: str) -> bytes:
    answer = _Answer(address)
    decoder: Decoder[FromWorker] = Decoder(FromWorker)

    def take(batch: list[bytes]) -> None:
        for payload in batch:
            try:
                message = decoder.decode(payload)
            except FrameError as error:
                answer.lose(str(error))
                return
            if isinstance(message, Answers):
                for _, said in message.answers:
                    if isinstance(said, StatusBody):
                        answer.settle(said.body)

    connection = await UnixTransport().open_connection(
        address,
        b"status",
        on_batch=take,
        on_connected=answer.connected.set,
        on_lost=answer.lose,
        limits=LinkLimits(message_bytes_max=4 << 20, queue_bytes_max=8 << 20),
    )
    return await _converse(connection, encode(Calls([(1, Status())])), answer)


async def _converse(connection: Connection, request: bytes, answer: _Answer) -> bytes:
    try:
        await connection.wait_connected()
        if connection.send(request) is not SendResult.SENT:
            raise PeerUnavailable(answer.address, "the connection broke")
        return await answer.body
    finally:
        await connection.close(0)
        answer.forget()


async def get(address: str, target: str) -> bytes:
    """What the HTTP port at `http://host:port` answers there. Raises ConfigError and PeerUnavailable."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if "://" in host or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            "address", address, "write it as unix:///path, ipc:///path, tcp://host:port or http://host:port"
        )
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            return await _get(address, target, reader, writer)
        finally:
            writer.close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: OSError) -> PeerUnavailable:
    return PeerUnavailable(
        address, f"{error.strerror or error}; check that the process runs and that this is its address"
    )


async def _get(address: str, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", address.removeprefix("http://")), ("Connection", "close")]
    writer.write(http.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
    writer.write(http.send(h11.EndOfMessage()) or b"")
    body = bytearray()
    try:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response) and event.status_code != 200:
                raise PeerUnavailable(address, f"answers {target} with {event.status_code}")
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return bytes(body)
    except h11.RemoteProtocolError as error:
        raise PeerUnavailable(address, f"does not speak HTTP: {error}") from error
