"""One ZeroMQ socket on the event loop: wakes up, drains, hands over a batch. Knows nothing of who is connected.

ZeroMQ's file descriptor is edge triggered: it becomes readable when the socket's mailbox gets its first command, and
reading *or sending* may empty the mailbox without any message being taken. So after each send and each batch the socket
is asked whether it has messages, and if so the next drain is scheduled by hand. `zmq.asyncio` does the same with some
futures for each message, at several times the cost.

Taking a message costs a quarter of a microsecond, asking for the socket's events two, and finding it empty by a failed
receive five. So a wake-up takes one message, asks once, and only then drains a burst until a receive fails.
"""

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import zmq

from kvcoord.errors import ConfigError
from kvcoord.transport.link import LinkLimits, LinkStatistics, SendResult, check_message_size

Item = TypeVar("Item")

ZmqContext = zmq.Context["zmq.Socket[bytes]"]
ZmqSocket = zmq.Socket[bytes]

OVERSIZE_FACTOR = 4
"""ZeroMQ disconnects a peer whose message exceeds its MAXMSGSIZE. That is set to this multiple of `message_bytes_max`:
a message between the two is dropped and counted and its peer stays connected."""

_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)


class ZeromqEndpoint(ABC, Generic[Item]):
    """Owns a context with one socket in it: the end of the context is the only word that the queue was sent."""

    def __init__(
        self,
        address: str,
        context: ZmqContext,
        socket: ZmqSocket,
        on_batch: Callable[[list[Item]], None],
        limits: LinkLimits,
    ) -> None:
        self.address = address
        self._context, self._socket, self._limits = context, socket, limits
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._counts = LinkStatistics()
        self._descriptor = cast(int, socket.get(zmq.FD))
        self._companions: list[Callable[[], None]] = []
        """What ends whatever lives beside the socket: other sockets of the context, its file. They must go first."""
        self._scheduled = False
        self._draining = False
        self._sent = False
        """Something was sent by what took the present batch: a wake-up may have been swallowed."""
        self._closed = False

    def statistics(self) -> LinkStatistics:
        """Counts since the endpoint was opened."""
        return self._counts.snapshot()

    @abstractmethod
    def _receive(self) -> Item | None:
        """One message, or None when it was dropped. Raises `zmq.Again` when none is there."""

    def _start(self) -> None:
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    async def close(self, linger_s: float | None = None) -> None:
        """As `link.Listener.close`. A thread waits for ZeroMQ, at most for the linger time."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        for close_companion in self._companions:
            close_companion()
        linger_s = self._limits.linger_s if linger_s is None else linger_s
        self._socket.close(linger=max(round(linger_s * 1000), 0))
        await self._loop.run_in_executor(None, self._context.term)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> bool:
        """Whether a message is there. If not, the descriptor tells of the next one."""
        return bool(cast(int, self._socket.get(zmq.EVENTS)) & _POLLIN)

    def _look_again(self) -> None:
        """Schedule a drain if messages are there; their wake-up may have been swallowed."""
        if not self._closed and not self._scheduled and self._readable():
            self._schedule()

    def _drain(self) -> None:
        """Hand over what is there, at most one batch, so that others on the event loop have their turn."""
        self._scheduled = False
        if self._closed:
            return
        batch: list[Item] = []
        emptied = self._receive_all(batch)
        self._counts.messages_received += len(batch)
        self._draining, self._sent = True, False
        try:
            if batch:
                self._on_batch(batch)
        finally:
            self._draining = False
            if self._sent or not emptied:
                self._look_again()

    def _receive_all(self, batch: list[Item]) -> bool:
        """Move what is there into `batch`, up to its limit. Whether nothing is left."""
        receive = self._receive
        try:
            for number in range(self._limits.batch_messages_max):
                item = receive()
                if item is not None:
                    batch.append(item)
                if number == 0 and not self._readable():
                    return True
        except zmq.Again:
            return True
        return False

    @abstractmethod
    def _try_send(self, peer: bytes, payload: bytes) -> SendResult:
        """Give one message to ZeroMQ if it takes it now."""

    def _send(self, peer: bytes, payload: bytes) -> SendResult:
        check_message_size(payload, self._limits.message_bytes_max)
        result = SendResult.UNREACHABLE if self._closed else self._try_send(peer, payload)
        self._counts.count_send(result, len(payload))
        if self._draining:
            self._sent = True
        else:
            self._look_again()
        return result

    def _receive_payload(self) -> bytes | None:
        """The last frame of a message; None when it is too long or more frames follow."""
        frame = self._socket.recv(_NOBLOCK, copy=False)
        frames = 1
        while frame.more:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames += 1
        if frames > 1:
            self._counts.messages_malformed += 1
            return None
        payload = frame.bytes
        size_bytes = len(payload)
        if size_bytes > self._limits.message_bytes_max:
            self._counts.messages_oversized += 1
            return None
        self._counts.bytes_received += size_bytes
        return payload


def limit_socket(socket: ZmqSocket, address: str, limits: LinkLimits) -> None:
    """Set every bound on purpose: ZeroMQ's defaults wait for ever and queue without regard to size."""
    milliseconds = {
        zmq.LINGER: limits.linger_s,
        zmq.CONNECT_TIMEOUT: limits.connect_timeout_s,
        zmq.HANDSHAKE_IVL: limits.connect_timeout_s,
        zmq.RECONNECT_IVL: limits.reconnect_interval_s,
        zmq.RECONNECT_IVL_MAX: limits.reconnect_interval_max_s,
    }
    for option, seconds in milliseconds.items():
        socket.set(option, round(seconds * 1000))
    socket.set(zmq.SNDHWM, limits.queue_messages_max)
    socket.set(zmq.RCVHWM, limits.queue_messages_max)
    socket.set(zmq.MAXMSGSIZE, limits.message_bytes_max * OVERSIZE_FACTOR)
    socket.set(zmq.IPV6, int("[" in address))
    # A host that vanished is noticed by the heartbeats above; this only frees its connection in the end.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


def address_error(address: str, error: zmq.ZMQError) -> ConfigError:
    """Say what to do about an address that ZeroMQ does not take."""
    fixes = {
        errno.EADDRINUSE: "already in use: stop the process that serves it or choose another port",
        errno.EADDRNOTAVAIL: "this host has no such address: use one of its own, or 127.0.0.1",
        errno.ENODEV: "this host has no such address or interface: use one of its own, or 127.0.0.1",
        errno.EINVAL: "write it as tcp://HOST:PORT or ipc:///absolute/path",
    }
    return ConfigError("address", address, fixes.get(error.errno or 0, f"ZeroMQ refuses it: {error.strerror}"))
