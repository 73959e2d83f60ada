"""One Unix stream socket with messages on it, as both ends of a node link use it. Knows no event loop and no peer.

Nothing here waits, except `wait`. The socket itself stays blocking, and each call says that it does not wait: so `wait`
is one system call, too. Not safe for threads: whoever owns a channel lets one at a time in, except that one may `wait`
while another sends.
"""

import socket
import struct
from collections import deque
from typing import Final

from kvcoord.transport.framing import MessageSplitter
from kvcoord.transport.link import FULL, SENT, UNREACHABLE, LinkLimits, LinkStatistics, SendResult

SKIP_FACTOR: Final = 4
"""A message up to so many times `message_bytes_max` is dropped and its peer stays; as over ZeroMQ."""

_RECEIVE_BYTES: Final = 64 << 10
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_TIMEOUT_SHORTEST_S: Final = 1e-6
_EARLY: Final = 0.8
_EARLIEST: Final = 0.67
"""Parts of the time asked for: a timeout is set to the one, and serves for later waits until it is below the other."""


class Channel:
    """Counts into the endpoint's statistics.

    `ended` is why nothing more comes in, empty while something may. `unsent` is what was taken for sending and is not
    with the system yet: `flush` when there is room. `descriptor` is -1 once closed.
    """

    __slots__ = (
        "_counts",
        "_limits",
        "_receive_timeout_s",
        "_socket",
        "_splitter",
        "_unsent_bytes",
        "descriptor",
        "ended",
        "unsent",
    )

    def __init__(self, connected: socket.socket, limits: LinkLimits, counts: LinkStatistics) -> None:
        self._socket = connected
        self._limits, self._counts = limits, counts
        self._splitter = MessageSplitter(limits.message_bytes_max, limits.message_bytes_max * SKIP_FACTOR)
        self.unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._receive_timeout_s = 0.0
        self.descriptor = connected.fileno()
        self.ended = ""

    def send(self, framed: bytes) -> SendResult:
        """Sends one framed message at once, or keeps what the system does not take, within the limits of the queue."""
        if self.ended:
            return UNREACHABLE
        if self.unsent:
            return self._keep(framed)
        try:
            sent = self._socket.send(framed, _AT_ONCE)
        except BlockingIOError:
            return self._keep(framed)
        except OSError:
            # Whoever reads learns why, after what the peer had said before.
            return UNREACHABLE
        if sent < len(framed):
            self._keep(framed[sent:])
        return SENT

    def flush(self) -> None:
        """Sends what was kept, as far as the system takes it."""
        while self.unsent:
            first = self.unsent[0]
            try:
                sent = self._socket.send(first, _AT_ONCE)
            except BlockingIOError:
                return
            except OSError:
                self.unsent.clear()
                self._unsent_bytes = 0
                return
            self._unsent_bytes -= sent
            if sent < len(first):
                self.unsent[0] = first[sent:]
            else:
                self.unsent.popleft()

    def receive(self) -> list[bytes]:
        """The messages in up to 64 KiB of what has arrived."""
        try:
            chunk = self._socket.recv(_RECEIVE_BYTES, _AT_ONCE)
        except BlockingIOError:
            return []
        except OSError as error:
            self.ended = f"connection broke: {error.strerror or error}"
            return []
        message = self._splitter.only(chunk)
        if message is None:
            return self.feed(chunk)
        self._counts.messages_received += 1
        self._counts.bytes_received += len(message)
        return [message]

    def wait(self, timeout_s: float) -> bytes | None:
        """Waits for up to 64 KiB, for `feed`. None: nothing has come yet. Empty: nothing will, see `ended`.

        None may come up to a third of the time early, so that waits of about the same length need no system call each.
        """
        flags = 0
        if timeout_s < _TIMEOUT_SHORTEST_S:
            flags = _AT_ONCE
        elif not timeout_s * _EARLIEST < self._receive_timeout_s <= timeout_s:
            self._receive_timeout_s = timeout_s * _EARLY
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(self._receive_timeout_s))
        try:
            return self._socket.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            self.ended = f"connection broke: {error.strerror or error}"
            return b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that end in what was received; nothing received is the end."""
        splitter, counts = self._splitter, self._counts
        if not chunk:
            counts.messages_malformed += splitter.partial_bytes > 0
            self.ended = "closed by the peer"
            return []
        skipped = splitter.skipped
        messages = splitter.feed(chunk)
        counts.messages_received += len(messages)
        counts.bytes_received += sum(map(len, messages))
        counts.messages_oversized += splitter.skipped - skipped
        if splitter.refused_bytes is not None:
            counts.messages_oversized += 1
            self.ended = f"message of {splitter.refused_bytes} bytes, message_bytes_max is exceeded"
        return messages

    def shut(self) -> None:
        """Ends both directions: whoever waits wakes, the peer hears of it. What was sent stays readable there."""
        self.ended = self.ended or "closed"
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Gives the descriptor back. A copy of it in a forked process does not keep the connection alive."""
        self.shut()
        self._socket.close()
        self.descriptor = -1

    def _keep(self, framed: bytes) -> SendResult:
        limits = self._limits
        size_bytes = self._unsent_bytes + len(framed)
        if len(self.unsent) >= limits.queue_messages_max or size_bytes > limits.queue_bytes_max:
            return FULL
        self.unsent.append(framed)
        self._unsent_bytes = size_bytes
        return SENT


def timeval(seconds: float) -> bytes:
    """`struct timeval`, at least a microsecond: zero would mean for ever."""
    whole, micros = divmod(max(round(seconds * 1e6), 1), 1_000_000)
    return struct.pack("ll", whole, micros)
