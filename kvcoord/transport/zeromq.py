"""Links to the coordinator: a ROUTER that serves many DEALERs, over `ipc://` on one node and `tcp://` between nodes.

Decisions about ZeroMQ's options:

- ROUTER_MANDATORY: a message to a peer that is not there is answered UNREACHABLE instead of silently dropped.
- ROUTER_HANDOVER: a peer that comes back under its identity takes over at once, also while the connection of its former
  life is not known to be dead yet. Without it such a peer would be ignored until TCP notices, which takes minutes. The
  price is that two live peers with one identity push each other out; who is right is decided above, by incarnation.
- IMMEDIATE stays off: when a connection breaks it makes ZeroMQ throw away what was received and not yet read, such as a
  coordinator's last decisions. Instead `send` itself answers UNREACHABLE while there is no connection. What was queued
  when a connection broke goes first to the next one.
- A ROUTER cannot name a peer that it lost, so `on_lost` of a listener is never called, but `on_parted` is. The next
  send to a killed peer is UNREACHABLE; heartbeats tell about silent ones.
- `ipc://` is protected by the permissions of its directory. `tcp://` needs keys (see `curve`) unless a flag says
  otherwise: whoever can connect can vote.
"""

from typing import cast

import zmq

from kvcoord.errors import ConfigError
from kvcoord.transport.address import SocketFile, claim_socket_path, parse_socket_path
from kvcoord.transport.curve import (
    CurveClientKeys,
    CurveServerKeys,
    Gatekeeper,
    secure_client,
    secure_server,
)
from kvcoord.transport.endpoint import (
    ZeromqEndpoint,
    ZmqContext,
    ZmqSocket,
    address_error,
    limit_socket,
)
from kvcoord.transport.link import (
    Absent,
    Connected,
    ConnectionBatch,
    LinkLimits,
    ListenerBatch,
    Lost,
    Parted,
    PeerLost,
    SendResult,
    check_identity,
)
from kvcoord.transport.monitor import HANDSHAKE_FAILURES, Monitor
from kvcoord.transport.presence import Presence

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_HANDSHAKE_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_CLOSED = int(zmq.EVENT_CLOSED)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZeromqTransport:
    """Opens ROUTER listeners and DEALER connections.

    `server_keys` are for listeners and `client_keys` for connections on `tcp://`; on `ipc://` neither is used.
    `insecure_tcp` allows `tcp://` without keys: for a network in which everybody may vote.
    """

    def __init__(
        self,
        *,
        server_keys: CurveServerKeys | None = None,
        client_keys: CurveClientKeys | None = None,
        insecure_tcp: bool = False,
    ) -> None:
        self._server_keys = server_keys
        self._client_keys = client_keys
        self._insecure_tcp = insecure_tcp

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> "ZeromqListener":
        """As `link.Transport.open_listener`; `on_lost` is never called. Port `*` lets the system pick one."""
        keys = self._server_keys if self._is_tcp(address, has_keys=self._server_keys is not None) else None
        if address.startswith("ipc://"):
            claim_socket_path(address)
        context = _make_context()
        socket = context.socket(zmq.ROUTER)
        limit_socket(socket, address, limits)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        gatekeeper = None
        if keys is not None:
            gatekeeper = Gatekeeper(context, keys.authorised_clients)
            secure_server(socket, keys)
        listener = ZeromqListener(address, context, socket, on_batch, limits, gatekeeper, on_parted)
        try:
            listener.bind()
        except zmq.ZMQError as error:
            await listener.close(0)
            raise address_error(address, error) from error
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
    ) -> "ZeromqConnection":
        """As `link.Transport.open_connection`; connects, and connects again after a loss, in the background."""
        keys = self._client_keys if self._is_tcp(address, has_keys=self._client_keys is not None) else None
        check_identity(identity)
        if address.startswith("ipc://"):
            parse_socket_path(address)
        context = _make_context()
        socket = context.socket(zmq.DEALER)
        limit_socket(socket, address, limits)
        socket.set(zmq.ROUTING_ID, identity)
        if keys is not None:
            secure_client(socket, keys)
        connection = ZeromqConnection(address, context, socket, on_batch, on_connected, on_lost, on_absent, limits)
        try:
            connection.connect()
        except zmq.ZMQError as error:
            await connection.close(0)
            raise address_error(address, error) from error
        return connection

    def _is_tcp(self, address: str, *, has_keys: bool) -> bool:
        """Whether keys apply. Raises `ConfigError` for another scheme and for TCP without keys."""
        if address.startswith("ipc://"):
            return False
        if not address.startswith("tcp://"):
            raise ConfigError("address", address, "write it as ipc:///absolute/path or tcp://HOST:PORT")
        if not has_keys and not self._insecure_tcp:
            fix = "TCP needs keys: give a key directory, or allow insecure_tcp where everybody may vote, or use ipc://"
            raise ConfigError("address", address, fix)
        return True


class ZeromqListener(ZeromqEndpoint[tuple[bytes, bytes]]):
    """A `link.Listener`; open it with `ZeromqTransport.open_listener`."""

    def __init__(
        self,
        address: str,
        context: ZmqContext,
        socket: ZmqSocket,
        on_batch: ListenerBatch,
        limits: LinkLimits,
        gatekeeper: Gatekeeper | None,
        on_parted: Parted | None,
    ) -> None:
        super().__init__(address, context, socket, on_batch, limits)
        self._on_parted = on_parted
        self._companions.append(Monitor(context, socket, self._on_event).close)
        if gatekeeper is not None:
            self._companions.append(gatekeeper.close)
        self._open_descriptors: set[int] = set()

    def bind(self) -> None:
        """Start to serve. Raises `zmq.ZMQError`."""
        self._socket.bind(self.address)
        self.address = cast(bytes, self._socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        if self.address.startswith("ipc://"):
            self._companions.append(SocketFile(parse_socket_path(self.address)).remove)
        self._start()

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        """As `link.Listener.send`."""
        return self._send(peer, payload)

    def _try_send(self, peer: bytes, payload: bytes) -> SendResult:
        socket = self._socket
        try:
            socket.send(peer, _NOBLOCK_MORE)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.UNREACHABLE
        socket.send(payload, _NOBLOCK)
        return SendResult.SENT

    def _receive(self) -> tuple[bytes, bytes] | None:
        peer = self._socket.recv(_NOBLOCK)
        payload = self._receive_payload()
        return None if payload is None else (peer, payload)

    def _on_event(self, event: int, value: int) -> None:
        counts = self._counts
        if event == _ACCEPTED:
            self._open_descriptors.add(value)
        elif event in HANDSHAKE_FAILURES:
            counts.peers_refused += 1
        elif event == _DISCONNECTED and value in self._open_descriptors:
            self._open_descriptors.remove(value)
            counts.peers_lost += 1
            if self._on_parted is not None and not self._closed:
                self._on_parted()
        counts.peers_connected = len(self._open_descriptors)


class ZeromqConnection(ZeromqEndpoint[bytes]):
    """A `link.Connection`; open it with `ZeromqTransport.open_connection`."""

    def __init__(
        self,
        address: str,
        context: ZmqContext,
        socket: ZmqSocket,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        on_absent: Absent | None,
        limits: LinkLimits,
    ) -> None:
        super().__init__(address, context, socket, on_batch, limits)
        self._on_connected, self._on_lost, self._on_absent = on_connected, on_lost, on_absent
        self._presence = Presence(address, limits.connect_timeout_s)
        self._monitor = Monitor(context, socket, self._on_event)
        self._companions.append(self._monitor.close)

    def connect(self) -> None:
        """Start to connect. Raises `zmq.ZMQError`."""
        self._socket.connect(self.address)
        self._start()

    @property
    def connected(self) -> bool:
        """As `link.Connection.connected`."""
        return self._presence.present

    async def wait_connected(self) -> None:
        """As `link.Connection.wait_connected`."""
        await self._presence.wait()

    def send(self, payload: bytes) -> SendResult:
        """As `link.Connection.send`."""
        return self._send(b"", payload)

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Connection.close`."""
        self._presence.close()
        await super().close(linger_s)

    def _try_send(self, peer: bytes, payload: bytes) -> SendResult:
        if not self._presence.present:
            return SendResult.UNREACHABLE
        try:
            self._socket.send(payload, _NOBLOCK)
        except zmq.Again:
            return SendResult.FULL
        return SendResult.SENT

    def _receive(self) -> bytes | None:
        return self._receive_payload()

    def _on_event(self, event: int, value: int) -> None:
        if event == _HANDSHAKE_SUCCEEDED:
            self._presence.arrive()
            self._counts.peers_connected = 1
            self._on_connected()
        elif event in HANDSHAKE_FAILURES:
            self._presence.depart(HANDSHAKE_FAILURES[event])
            self._counts.peers_refused += 1
            self._miss()
        elif event == _DISCONNECTED and self._presence.present:
            self._lose()
        elif event == _CLOSED and not self._presence.present:
            self._miss()

    def _miss(self) -> None:
        if self._on_absent is not None and not self._closed:
            self._on_absent()

    def _lose(self) -> None:
        """Hand over what the peer had sent before it went, then tell."""
        cause = "the connection broke"
        self._presence.depart(cause)
        self._counts.peers_connected = 0
        self._counts.peers_lost += 1
        for _ in range(self._limits.queue_messages_max // self._limits.batch_messages_max + 2):
            self._drain()
            if not self._scheduled:
                break
        if not self._closed:
            self._on_lost(cause)


def _make_context() -> ZmqContext:
    context: ZmqContext = zmq.Context(io_threads=1)
    # Sockets that were forgotten do not keep the process from ending.
    context.set(zmq.BLOCKY, 0)
    return context
