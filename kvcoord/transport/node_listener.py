"""The listening end of a node link: many peers, each with a socket of its own, drained together. See `node`."""

import asyncio
import select
import socket
from typing import Final

from kvcoord.errors import ConfigError, UsageError
from kvcoord.transport.address import SocketFile, claim_socket_path
from kvcoord.transport.channel import Channel
from kvcoord.transport.framing import prefix_length
from kvcoord.transport.link import (
    IDENTITY_BYTES_MAX,
    SENT,
    UNREACHABLE,
    LinkLimits,
    LinkStatistics,
    ListenerBatch,
    PeerLost,
    SendResult,
    check_identity,
    check_message_size,
)

GREETING: Final = b"kvcoord node link 1"
"""What a listener says first, and a connection before its identity. Another version has another number."""

_BACKLOG: Final = 1024
_ACCEPT_AGAIN_S: Final = 0.1
"""After the process ran out of descriptors: trying at once would only burn time."""

_LOOKS_MAX: Final = 8
"""Looks at the sockets in one wake-up: what comes while a batch is worked on need not wait for the next one."""

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_READ_AND_WRITE: Final = _READ | _WRITE

Batch = list[tuple[bytes, bytes]]


class _Peer:
    """One accepted connection. `name` is empty until it has introduced itself, which it has to do before `timer`."""

    __slots__ = ("channel", "name", "timer")

    def __init__(self, channel: Channel, timer: asyncio.TimerHandle) -> None:
        self.channel, self.timer = channel, timer
        self.name = b""


class NodeListener:
    """A `link.Listener`; open it with `node.NodeTransport.open_listener`."""

    def __init__(self, address: str, *, on_batch: ListenerBatch, on_lost: PeerLost, limits: LinkLimits) -> None:
        self.address = address
        self._on_batch, self._on_lost, self._limits = on_batch, on_lost, limits
        self._loop = asyncio.get_running_loop()
        self._counts = LinkStatistics()
        self._peers: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
        self._framed: tuple[bytes, bytes] = (b"", prefix_length(b""))
        """The last payload that was sent, and its bytes on the stream: a message to all is framed once."""
        self._closed = False
        self._flushed: asyncio.Event | None = None

    def start(self) -> None:
        """Bind and serve. Raises `ConfigError`."""
        path = claim_socket_path(self.address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(path)
            self._file = SocketFile(path)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError("address", self.address, f"cannot serve there: {error.strerror or error}") from error
        self._epoll = select.epoll()
        self._epoll.register(self._socket.fileno(), _READ)
        self._loop.add_reader(self._epoll.fileno(), self._drain)

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        """As `link.Listener.send`."""
        if payload is not self._framed[0]:
            check_message_size(payload, self._limits.message_bytes_max)
            self._framed = payload, prefix_length(payload)
        there = self._peers.get(peer)
        if there is None:
            self._counts.count_send(UNREACHABLE, len(payload))
            return UNREACHABLE
        channel, counts = there.channel, self._counts
        result = channel.send(self._framed[1])
        if result is SENT:
            counts.messages_sent += 1
            counts.bytes_sent += len(payload)
        else:
            counts.count_send(result, len(payload))
        if channel.unsent:
            self._epoll.modify(channel.descriptor, _READ_AND_WRITE)
        return result

    def statistics(self) -> LinkStatistics:
        """As `link.Listener.statistics`."""
        return self._counts.snapshot()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Listener.close`. Removes the socket file, unless somebody else has put another there."""
        if self._closed:
            return
        self._closed = True
        self._file.remove()
        self._epoll.unregister(self._socket.fileno())
        self._socket.close()
        linger_s = self._limits.linger_s if linger_s is None else linger_s
        if linger_s > 0 and self._unflushed():
            self._flushed = asyncio.Event()
            try:
                async with asyncio.timeout(linger_s):
                    await self._flushed.wait()
            except TimeoutError:
                pass  # What is left is dropped, as promised.
        self._loop.remove_reader(self._epoll.fileno())
        for peer in list(self._by_descriptor.values()):
            self._forget(peer)
        self._epoll.close()

    # --- events ---------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Hands over what has arrived from all peers, as one batch for each look, then tells who is gone."""
        for _ in range(_LOOKS_MAX):
            ready = self._epoll.poll(0)
            if not ready:
                return
            batch: Batch = []
            gone: list[_Peer] = []
            for descriptor, events in ready:
                peer = self._by_descriptor.get(descriptor)
                if peer is None:
                    self._accept()
                elif events == _READ and peer.name:
                    name, channel = peer.name, peer.channel
                    for message in channel.receive():
                        batch.append((name, message))
                    if channel.ended:
                        gone.append(peer)
                else:
                    self._serve(peer, events, batch, gone)
            if batch and not self._closed:
                self._on_batch(batch)
            for peer in gone:
                self._lose(peer, peer.channel.ended)
            if self._closed:
                self._tell_flushed()
                return

    def _serve(self, peer: _Peer, events: int, batch: Batch, gone: list[_Peer]) -> None:
        """A peer that has yet to introduce itself, that has room again, or that has gone."""
        channel = peer.channel
        if events & _WRITE:
            channel.flush()
            if not channel.unsent:
                self._epoll.modify(channel.descriptor, _READ)
        if events != _WRITE:
            messages = channel.receive()
            name = peer.name
            if messages and not name:
                name = self._introduced(peer, messages.pop(0), batch)
            if name:
                batch += [(name, message) for message in messages]
        if channel.ended:
            gone.append(peer)

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left: the next one that closes makes room.
            self._epoll.modify(self._socket.fileno(), 0)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again)
            return
        if len(self._by_descriptor) >= self._limits.peers_max:
            self._counts.peers_refused += 1
            connected.close()
            return
        channel = Channel(connected, self._limits, self._counts)
        timer = self._loop.call_later(self._limits.connect_timeout_s, self._give_up, channel.descriptor)
        self._by_descriptor[channel.descriptor] = _Peer(channel, timer)
        self._epoll.register(channel.descriptor, _READ)
        channel.send(prefix_length(GREETING))

    def _accept_again(self) -> None:
        if not self._closed:
            self._epoll.modify(self._socket.fileno(), _READ)

    def _introduced(self, peer: _Peer, introduction: bytes, batch: Batch) -> bytes:
        """The name of a peer by its first message. Empty: it is none of ours."""
        peer.timer.cancel()
        # It counts as nothing that was sent.
        self._counts.messages_received -= 1
        self._counts.bytes_received -= len(introduction)
        name = introduction.removeprefix(GREETING)
        try:
            check_identity(name)
        except UsageError:
            name = b""
        if not introduction.startswith(GREETING) or not name:
            peer.channel.ended = f"no introduction as GREETING and 1 to {IDENTITY_BYTES_MAX} bytes"
            return b""
        former = self._peers.get(name)
        if former is not None:
            if batch and not self._closed:
                # What the former one has said comes before its end.
                self._on_batch(batch.copy())
                batch.clear()
            self._lose(former, "another connection took over the identity")
        peer.name = name
        self._peers[name] = peer
        self._counts.peers_connected += 1
        return name

    def _give_up(self, descriptor: int) -> None:
        """Whoever has not introduced itself in time is none of ours."""
        self._lose(self._by_descriptor[descriptor], "no introduction within connect_timeout_s")

    def _lose(self, peer: _Peer, cause: str) -> None:
        if self._by_descriptor.get(peer.channel.descriptor) is not peer:
            return
        self._forget(peer)
        if not peer.name:
            self._counts.peers_refused += 1
            return
        self._counts.peers_lost += 1
        if not self._closed:
            self._on_lost(peer.name, cause)

    def _forget(self, peer: _Peer) -> None:
        """Closes the connection of a peer."""
        peer.timer.cancel()
        descriptor = peer.channel.descriptor
        del self._by_descriptor[descriptor]
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self._counts.peers_connected -= 1
        self._epoll.unregister(descriptor)
        peer.channel.close()

    # --- closing --------------------------------------------------------------------------------------------------

    def _unflushed(self) -> bool:
        return any(peer.channel.unsent for peer in self._by_descriptor.values())

    def _tell_flushed(self) -> None:
        if self._flushed is not None and not self._unflushed():
            self._flushed.set()
