"""The connecting end of a node link: one socket, connected again after each loss. See `node`.

Who reads is decided here. By default the event loop does. A thread that waits for an answer may borrow the reading end:
it then waits on the socket itself and hands over what comes, and the loop's thread is not woken for it. What there is
to decide about the connection stays with the loop: its losses, its deadlines, connecting again.
"""

import asyncio
import os
import select
import socket
from contextlib import AbstractContextManager
from typing import Final

from kvcoord.transport.address import parse_socket_path
from kvcoord.transport.channel import Channel
from kvcoord.transport.framing import prefix_length
from kvcoord.transport.link import (
    PREFIX_BYTES,
    SENT,
    UNREACHABLE,
    Absent,
    Connected,
    ConnectionBatch,
    LinkLimits,
    LinkStatistics,
    Lost,
    SendResult,
    check_message_size,
)
from kvcoord.transport.node_listener import GREETING
from kvcoord.transport.presence import Presence

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT


class NodeConnection:
    """A `link.BorrowedConnection`; open it with `node.NodeTransport.open_connection`.

    Everything that the loop calls runs inside `guard`. `send` and `borrow` are for whoever holds it.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        on_absent: Absent | None,
        limits: LinkLimits,
        guard: AbstractContextManager[object],
    ) -> None:
        self.address = address
        self._path = parse_socket_path(address)
        self._identity = identity
        self._on_batch, self._on_connected = on_batch, on_connected
        self._on_lost, self._on_absent = on_lost, on_absent
        self._limits, self._guard = limits, guard
        self._message_bytes_max = limits.message_bytes_max
        self._loop = asyncio.get_running_loop()
        self._counts = LinkStatistics()
        """All but what was sent, which an engine's thread counts where it has just looked."""
        self._messages_sent = self._bytes_sent = 0
        self._presence = Presence(address, limits.connect_timeout_s)
        self._epoll = select.epoll()
        self._channel: Channel | None = None
        self._borrowed: Channel | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The end of the greeting's time while connecting, the next attempt while not."""
        self._interval_s = limits.reconnect_interval_s
        self._flushed: asyncio.Event | None = None

    @property
    def connected(self) -> bool:
        """As `link.Connection.connected`."""
        return self._presence.present

    async def wait_connected(self) -> None:
        """As `link.Connection.wait_connected`."""
        await self._presence.wait()

    def send(self, payload: bytes) -> SendResult:
        """As `link.Connection.send`."""
        size_bytes, channel = len(payload), self._channel
        if size_bytes > self._message_bytes_max:
            check_message_size(payload, self._message_bytes_max)
        result = UNREACHABLE
        if channel is not None and self._presence.present:
            result = channel.send(size_bytes.to_bytes(PREFIX_BYTES, "little") + payload)
            if channel.unsent:
                self._watch(channel)
        if result is SENT:
            self._messages_sent += 1
            self._bytes_sent += size_bytes
        else:
            self._counts.count_send(result, size_bytes)
        return result

    def statistics(self) -> LinkStatistics:
        """As `link.Connection.statistics`."""
        counts = self._counts.snapshot()
        counts.messages_sent, counts.bytes_sent = self._messages_sent, self._bytes_sent
        return counts

    def start(self) -> None:
        """Makes the first attempt. Called by the event loop once the opener has its connection."""
        if not self._presence.closed:
            self._loop.add_reader(self._epoll.fileno(), self._woken)
            self._attempt()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Connection.close`. Whoever has borrowed the reading end wakes up."""
        with self._guard:
            if self._presence.closed:
                return
            self._presence.close()
            self._set_timer(None)
            channel = self._channel
        linger_s = self._limits.linger_s if linger_s is None else linger_s
        if channel is not None and channel.unsent and linger_s > 0:
            self._flushed = asyncio.Event()
            try:
                async with asyncio.timeout(linger_s):
                    await self._flushed.wait()
            except TimeoutError:
                pass  # What is left is dropped, as promised.
        with self._guard:
            self._loop.remove_reader(self._epoll.fileno())
            if self._channel is not None:
                self._drop(self._channel)
            self._epoll.close()

    # --- another thread reads -------------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Takes the reading end, for the thread that calls. False: there is no connection, or it is borrowed already.

        Called inside `guard`. From here on the loop reads nothing until `give_back`.
        """
        channel = self._channel
        if channel is None or self._borrowed is not None or not self._presence.present:
            return False
        self._borrowed = channel
        self._watch(channel)
        return True

    def pump(self, timeout_s: float) -> bool:
        """Waits at most so long for something to arrive, and hands it over inside `guard`; called outside of it.

        False: nothing more will come this way; give back, and let the loop find the next connection.
        """
        channel = self._borrowed
        if channel is None:
            return False
        chunk = channel.wait(timeout_s)
        if chunk is None:
            return True
        with self._guard:
            if channel is not self._channel:
                return False
            messages = channel.feed(chunk)
            if messages and self._presence.present:
                self._on_batch(messages)
            return not channel.ended

    def interrupt(self) -> None:
        """Wakes whoever has borrowed the reading end, at the price of the connection. Called inside `guard`."""
        if self._borrowed is not None:
            self._borrowed.shut()

    def give_back(self) -> None:
        """The loop reads again. Called outside `guard`."""
        with self._guard:
            channel, self._borrowed = self._borrowed, None
            if channel is None:
                return
            if channel is not self._channel:
                channel.close()
                return
            self._watch(channel)
            if channel.ended:
                # The loop may not be told of it once more by the socket.
                self._loop.call_soon_threadsafe(self._woken)

    # --- connecting -----------------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        with self._guard:
            self._set_timer(None)
            if self._presence.closed:
                return
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connecting.setblocking(False)
            code = connecting.connect_ex(self._path)
            if code:
                connecting.close()
                self._miss(os.strerror(code))
                return
            connecting.setblocking(True)
            self._channel = Channel(connecting, self._limits, self._counts)
            self._epoll.register(self._channel.descriptor, _READ)
            self._channel.send(prefix_length(GREETING + self._identity))
            self._set_timer(self._loop.call_later(self._limits.connect_timeout_s, self._ungreeted))

    def _ungreeted(self) -> None:
        with self._guard:
            if self._channel is not None and not self._presence.present:
                self._drop(self._channel)
                self._miss("it does not greet: it stands still, or it is no coordinator")

    def _miss(self, cause: str) -> None:
        """This attempt has failed; the next one follows, later each time."""
        self._presence.depart(cause)
        self._try_again()
        if self._on_absent is not None and not self._presence.closed:
            self._on_absent()

    def _try_again(self) -> None:
        self._set_timer(self._loop.call_later(self._interval_s, self._attempt))
        self._interval_s = min(self._interval_s * 2, self._limits.reconnect_interval_max_s)

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    # --- events ---------------------------------------------------------------------------------------------------

    def _woken(self) -> None:
        """The socket has something, or room, or has ended."""
        with self._guard:
            channel = self._channel
            if channel is None:
                return
            if channel.unsent:
                channel.flush()
                self._watch(channel)
                self._tell_flushed(channel)
            if channel is self._borrowed:
                return
            messages = [] if channel.ended else channel.receive()
            if messages and not self._presence.present and not self._presence.closed:
                self._greeted(channel, messages.pop(0))
            if messages and self._presence.present:
                self._on_batch(messages)
            if channel.ended and channel is self._channel:
                self._lose(channel)

    def _greeted(self, channel: Channel, greeting: bytes) -> None:
        """The first message. It counts as nothing that was sent."""
        self._counts.messages_received -= 1
        self._counts.bytes_received -= len(greeting)
        if greeting != GREETING:
            channel.ended = "what serves there is no coordinator of this version"
            return
        self._set_timer(None)
        self._interval_s = self._limits.reconnect_interval_s
        self._presence.arrive()
        self._counts.peers_connected = 1
        self._on_connected()

    def _lose(self, channel: Channel) -> None:
        """The connection has ended. One that never was there is a failed attempt."""
        present, cause = self._presence.present, channel.ended
        self._drop(channel)
        if self._presence.closed:
            return
        if not present:
            self._counts.peers_refused += 1
            self._miss(cause)
            return
        self._counts.peers_lost += 1
        self._presence.depart(cause)
        self._try_again()
        self._on_lost(cause)

    def _drop(self, channel: Channel) -> None:
        """Lets go of the socket; while it is borrowed, its borrower wakes and closes it."""
        self._epoll.unregister(channel.descriptor)
        self._channel = None
        self._counts.peers_connected = 0
        self._set_timer(None)
        if channel is self._borrowed:
            channel.shut()
        else:
            channel.close()
        if self._flushed is not None:
            self._flushed.set()

    def _watch(self, channel: Channel) -> None:
        """Has the loop woken for what it has to do with this socket."""
        events = 0 if channel is self._borrowed else _READ
        self._epoll.modify(channel.descriptor, events | _WRITE if channel.unsent else events)

    def _tell_flushed(self, channel: Channel) -> None:
        if self._flushed is not None and not channel.unsent:
            self._flushed.set()
