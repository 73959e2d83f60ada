"""The link between an engine and its sidecar: a Unix stream socket on the event loop.

One length-prefixed message after the other. Connections have no names: the listener numbers them. A message beyond
the limit ends its connection, because the rest of the stream can no longer be trusted. `blocking` has the client end
for threads without an event loop.
"""

import asyncio
import socket

from kvcoord.errors import ConfigError, PeerUnavailable
from kvcoord.transport.address import SocketFile, claim_socket_path, parse_socket_path
from kvcoord.transport.link import (
    Absent,
    Connected,
    ConnectionBatch,
    LinkLimits,
    LinkStatistics,
    ListenerBatch,
    Lost,
    Parted,
    PeerLost,
    SendResult,
    check_message_size,
)
from kvcoord.transport.stream import Stream, close_streams

_BACKLOG = 128


class UnixTransport:
    """Opens Unix listeners and connections at `unix:///path` or `ipc:///path`."""

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> "UnixListener":
        """As `link.Transport.open_listener`. A socket file left behind by a killed process is replaced."""
        listener = UnixListener(address, on_batch=on_batch, on_lost=on_lost, limits=limits)
        await listener.start()
        return listener

    async def open_connection(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
        on_absent: Absent | None = None,
    ) -> "UnixConnection":
        """As `link.Transport.open_connection`. Raises `PeerUnavailable` when nobody serves there."""
        connection = UnixConnection(
            address, on_batch=on_batch, on_connected=on_connected, on_lost=on_lost, limits=limits
        )
        await connection.start()
        return connection


class UnixListener:
    """Serves many local peers. A `link.Listener`; open it with `UnixTransport.open_listener`."""

    def __init__(self, address: str, *, on_batch: ListenerBatch, on_lost: PeerLost, limits: LinkLimits) -> None:
        self.address = address
        self._on_batch, self._on_lost, self._limits = on_batch, on_lost, limits
        self._counts = LinkStatistics()
        self._streams: dict[bytes, Stream] = {}
        self._peers_numbered = 0
        self._server: asyncio.Server | None = None
        self._closed = False
        self._file: SocketFile | None = None

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError`."""
        path = claim_socket_path(self.address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            self._file = SocketFile(path)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._make_stream, sock=sock, backlog=_BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError("address", self.address, f"cannot serve there: {error.strerror or error}") from error

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        """As `link.Listener.send`."""
        stream = self._streams.get(peer)
        if stream is not None:
            return stream.send(payload)
        check_message_size(payload, self._limits.message_bytes_max)
        self._counts.count_send(SendResult.UNREACHABLE, len(payload))
        return SendResult.UNREACHABLE

    def drop(self, peer: bytes) -> None:
        """End this peer's connection at once, as when it reads nothing. `on_lost` follows."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.abort()

    def statistics(self) -> LinkStatistics:
        """As `link.Listener.statistics`."""
        return self._counts.snapshot()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Listener.close`. Removes the socket file, unless somebody else has put another there."""
        server = self._server
        if server is None or self._closed:
            return
        self._closed = True
        if self._file is not None:
            self._file.remove()
        server.close()
        streams = list(self._streams.values())
        self._streams.clear()
        await close_streams(streams, self._limits.linger_s if linger_s is None else linger_s)
        await server.wait_closed()

    def _make_stream(self) -> Stream:
        return Stream(
            self._limits,
            self._counts,
            on_open=self._welcome,
            on_messages=lambda stream, messages: self._on_batch([(stream.peer, message) for message in messages]),
            on_closed=self._forget,
        )

    def _welcome(self, stream: Stream) -> bool:
        if self._closed or len(self._streams) >= self._limits.peers_max:
            return False
        self._peers_numbered += 1
        stream.peer = str(self._peers_numbered).encode()
        self._streams[stream.peer] = stream
        return True

    def _forget(self, stream: Stream, cause: str) -> None:
        if self._streams.pop(stream.peer, None) is not None:
            self._on_lost(stream.peer, cause)


class UnixConnection:
    """One local peer. A `link.Connection`; open it with `UnixTransport.open_connection`."""

    def __init__(
        self,
        address: str,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
    ) -> None:
        self.address = address
        self._path = parse_socket_path(address)
        self._on_batch, self._on_connected, self._on_lost = on_batch, on_connected, on_lost
        self._limits = limits
        self._counts = LinkStatistics()
        self._begun = False
        self._closed = False
        self._lost_cause = ""
        self._early: list[bytes] = []
        self._stream = Stream(
            limits,
            self._counts,
            on_open=lambda stream: True,
            on_messages=lambda stream, messages: self._take(messages),
            on_closed=lambda stream, cause: self._end(cause),
        )

    async def start(self) -> None:
        """Connect. Raises `PeerUnavailable`. `on_connected` follows in the next turn of the event loop."""
        limit_s = self._limits.connect_timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                await loop.create_unix_connection(lambda: self._stream, self._path)
        except TimeoutError as error:
            raise PeerUnavailable(self.address, f"no answer within connect_timeout_s={limit_s:g} s") from error
        except OSError as error:
            raise PeerUnavailable(self.address, error.strerror or str(error)) from error
        loop.call_soon(self._begin)

    @property
    def connected(self) -> bool:
        """As `link.Connection.connected`."""
        return self._counts.peers_connected > 0

    async def wait_connected(self) -> None:
        """As `link.Connection.wait_connected`; a lost connection does not come back."""
        if not self.connected:
            raise PeerUnavailable(self.address, "the connection is closed; open another one")

    def send(self, payload: bytes) -> SendResult:
        """As `link.Connection.send`."""
        return self._stream.send(payload)

    def statistics(self) -> LinkStatistics:
        """As `link.Connection.statistics`."""
        return self._counts.snapshot()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Connection.close`."""
        self._closed = True
        await close_streams([self._stream], self._limits.linger_s if linger_s is None else linger_s)

    def _begin(self) -> None:
        """Say that the connection is there, then hand over what came before the opener could know it."""
        self._begun = True
        if self._closed:
            return
        self._on_connected()
        early, self._early = self._early, []
        if early and not self._closed:
            self._on_batch(early)
        if self._lost_cause and not self._closed:
            self._on_lost(self._lost_cause)

    def _take(self, messages: list[bytes]) -> None:
        if self._begun:
            self._on_batch(messages)
        else:
            self._early += messages

    def _end(self, cause: str) -> None:
        self._lost_cause = cause
        if self._begun:
            self._on_lost(cause)
