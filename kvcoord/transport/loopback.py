"""The transport inside one process: the same promises as the real ones, no sockets, no threads, no clock.

Everything is delivered by the event loop in the order in which it was sent, so a test that uses it is deterministic.
As over ZeroMQ, connections may be opened before their listener, and come back when a listener opens at the address.
"""

import asyncio

from kvcoord.errors import ConfigError
from kvcoord.transport.inbox import Inbox, Notice
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
    check_identity,
    check_message_size,
)
from kvcoord.transport.presence import Presence

_SCHEME = "loopback://"


class LoopbackTransport:
    """One private network: endpoints of different instances never meet. Addresses are `loopback://name`.

    `loopback://*` picks a name. A connection whose identity another one takes over is lost and does not come back.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, LoopbackListener] = {}
        self._waiting: list[LoopbackConnection] = []
        self._names_picked = 0

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> "LoopbackListener":
        """As `link.Transport.open_listener`."""
        _check_address(address)
        if address == f"{_SCHEME}*":
            self._names_picked += 1
            address = f"{_SCHEME}{self._names_picked}"
        if address in self._listeners:
            raise ConfigError("address", address, "already in use: close the other listener or choose another name")
        listener = LoopbackListener(self, address, on_batch, on_lost, limits)
        self._listeners[address] = listener
        back = [connection for connection in self._waiting if connection.address == address]
        self._waiting = [connection for connection in self._waiting if connection.address != address]
        for connection in back:
            self.seek(connection)
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
    ) -> "LoopbackConnection":
        """As `link.Transport.open_connection`."""
        _check_address(address)
        check_identity(identity)
        connection = LoopbackConnection(self, address, identity, on_batch, on_connected, on_lost, on_absent, limits)
        self.seek(connection)
        return connection

    def seek(self, connection: "LoopbackConnection") -> None:
        """Connect in a later turn of the event loop, or once a listener opens."""
        listener = self._listeners.get(connection.address)
        if listener is None:
            self._waiting.append(connection)
            connection.miss()
        else:
            asyncio.get_running_loop().call_soon(connection.attach, listener)

    def forget(self, endpoint: "LoopbackListener | LoopbackConnection") -> None:
        """The endpoint was closed."""
        if isinstance(endpoint, LoopbackListener):
            self._listeners.pop(endpoint.address, None)
        elif endpoint in self._waiting:
            self._waiting.remove(endpoint)


class LoopbackListener:
    """A `link.Listener`; open it with `LoopbackTransport.open_listener`."""

    def __init__(
        self,
        network: LoopbackTransport,
        address: str,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
    ) -> None:
        self.address = address
        self.closed = False
        self._network, self._on_batch, self._on_lost, self._limits = network, on_batch, on_lost, limits
        self._counts = LinkStatistics()
        self._inbox: Inbox[tuple[bytes, bytes]] = Inbox(self._deliver, limits.batch_messages_max)
        self._connections: dict[bytes, LoopbackConnection] = {}
        self._queued: dict[bytes, int] = {}

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        """As `link.Listener.send`."""
        check_message_size(payload, self._limits.message_bytes_max)
        connection = self._connections.get(peer)
        if connection is None:
            result = SendResult.UNREACHABLE
        else:
            result = connection.accept(payload, self._limits.queue_messages_max)
        self._counts.count_send(result, len(payload))
        return result

    def statistics(self) -> LinkStatistics:
        """As `link.Listener.statistics`."""
        return self._counts.snapshot()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Listener.close`. Linger 0 drops what peers have not taken yet; else the event loop delivers it."""
        if self.closed:
            return
        self.closed = True
        self._network.forget(self)
        self._inbox.close()
        linger_s = self._limits.linger_s if linger_s is None else linger_s
        for connection in self._connections.values():
            connection.detach("the listener closed", drop=linger_s == 0, seek=True)
        self._connections.clear()
        self._counts.peers_connected = 0

    def join(self, connection: "LoopbackConnection") -> None:
        """A connection arrives; one of the same identity gives way."""
        old = self._connections.get(connection.identity)
        if old is not None:
            self.part(old, "another connection took over the identity", drop=False)
            old.detach("another connection took over the identity", drop=False, seek=False)
        self._connections[connection.identity] = connection
        self._counts.peers_connected += 1

    def part(self, connection: "LoopbackConnection", cause: str, *, drop: bool) -> None:
        """A connection goes; `drop` what it has queued."""
        peer = connection.identity
        if self._connections.get(peer) is not connection:
            return
        del self._connections[peer]
        self._counts.peers_connected -= 1
        self._counts.peers_lost += 1
        if drop:
            self._inbox.drop(lambda item: item[0] == peer)
            self._queued.pop(peer, None)
        self._inbox.put(Notice(lambda: self._on_lost(peer, cause)))

    def accept(self, peer: bytes, payload: bytes, queue_messages_max: int) -> SendResult:
        """Take a message from a peer whose queue has room."""
        queued = self._queued.get(peer, 0)
        if queued >= queue_messages_max:
            return SendResult.FULL
        if len(payload) > self._limits.message_bytes_max:
            self._counts.messages_oversized += 1
            return SendResult.SENT
        self._queued[peer] = queued + 1
        self._inbox.put((peer, payload))
        return SendResult.SENT

    def _deliver(self, batch: list[tuple[bytes, bytes]]) -> None:
        for peer, payload in batch:
            self._counts.bytes_received += len(payload)
            left = self._queued[peer] - 1
            if left:
                self._queued[peer] = left
            else:
                del self._queued[peer]
        self._counts.messages_received += len(batch)
        self._on_batch(batch)


class LoopbackConnection:
    """A `link.Connection`; open it with `LoopbackTransport.open_connection`."""

    def __init__(
        self,
        network: LoopbackTransport,
        address: str,
        identity: bytes,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        on_absent: Absent | None,
        limits: LinkLimits,
    ) -> None:
        self.address = address
        self.identity = identity
        self._network, self._limits = network, limits
        self._on_batch = on_batch
        self._on_connected, self._on_lost, self._on_absent = on_connected, on_lost, on_absent
        self._counts = LinkStatistics()
        self._inbox: Inbox[bytes] = Inbox(self._deliver, limits.batch_messages_max)
        self._queued = 0
        self._listener: LoopbackListener | None = None
        self._presence = Presence(address, limits.connect_timeout_s)

    @property
    def connected(self) -> bool:
        """As `link.Connection.connected`."""
        return self._listener is not None

    async def wait_connected(self) -> None:
        """As `link.Connection.wait_connected`."""
        await self._presence.wait()

    def send(self, payload: bytes) -> SendResult:
        """As `link.Connection.send`."""
        check_message_size(payload, self._limits.message_bytes_max)
        if self._listener is None:
            result = SendResult.UNREACHABLE
        else:
            result = self._listener.accept(self.identity, payload, self._limits.queue_messages_max)
        self._counts.count_send(result, len(payload))
        return result

    def statistics(self) -> LinkStatistics:
        """As `link.Connection.statistics`."""
        return self._counts.snapshot()

    async def close(self, linger_s: float | None = None) -> None:
        """As `LoopbackListener.close`."""
        if self._presence.closed:
            return
        self._presence.close()
        self._network.forget(self)
        self._inbox.close()
        listener, self._listener = self._listener, None
        if listener is not None:
            self._counts.peers_connected = 0
            linger_s = self._limits.linger_s if linger_s is None else linger_s
            listener.part(self, "closed by the peer", drop=linger_s == 0)

    def attach(self, listener: LoopbackListener) -> None:
        """The listener is there."""
        if self._presence.closed or self._listener is not None:
            return
        if listener.closed:
            self._network.seek(self)
            return
        listener.join(self)
        self._listener = listener
        self._counts.peers_connected = 1
        self._presence.arrive()
        self._inbox.put(Notice(self._on_connected))

    def miss(self) -> None:
        """Nobody listens there now."""
        if self._on_absent is not None:
            self._inbox.put(Notice(self._on_absent))

    def detach(self, cause: str, *, drop: bool, seek: bool) -> None:
        """The listener is gone; `drop` what it had queued, `seek` the next one."""
        self._listener = None
        self._presence.depart(cause)
        self._counts.peers_connected = 0
        self._counts.peers_lost += 1
        if drop:
            self._inbox.drop(lambda item: True)
            self._queued = 0
        self._inbox.put(Notice(lambda: self._on_lost(cause)))
        if seek:
            self._network.seek(self)

    def accept(self, payload: bytes, queue_messages_max: int) -> SendResult:
        """Take a message from the listener when its queue has room."""
        if self._queued >= queue_messages_max:
            return SendResult.FULL
        if len(payload) > self._limits.message_bytes_max:
            self._counts.messages_oversized += 1
            return SendResult.SENT
        self._queued += 1
        self._inbox.put(payload)
        return SendResult.SENT

    def _deliver(self, batch: list[bytes]) -> None:
        self._queued -= len(batch)
        self._counts.messages_received += len(batch)
        self._counts.bytes_received += sum(map(len, batch))
        self._on_batch(batch)


def _check_address(address: str) -> None:
    if not address.startswith(_SCHEME) or address == _SCHEME:
        raise ConfigError("address", address, f"write a loopback address as {_SCHEME}name")
