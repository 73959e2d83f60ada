"""The client end of a Unix link for threads without an event loop, such as an engine's scheduler thread.

A message costs one system call to send and one to receive. One thread uses a connection at a time.
"""

import socket
import time
from collections import deque
from typing import NoReturn

from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.transport.address import parse_socket_path
from kvcoord.transport.channel import timeval
from kvcoord.transport.framing import MessageSplitter, prefix_length
from kvcoord.transport.link import LinkLimits, LinkStatistics, SendResult, check_message_size

_RECEIVE_BYTES = 64 << 10
_TIMEOUT_SHORTEST_S = 1e-6


class BlockingUnixConnection:
    """A connection to a `UnixListener`. Raises `PeerUnavailable` when nobody serves at `address`."""

    def __init__(self, address: str, limits: LinkLimits) -> None:
        self.address = address
        self._limits = limits
        self._counts = LinkStatistics()
        self._splitter = MessageSplitter(limits.message_bytes_max)
        self._received: deque[bytes] = deque()
        self._receive_timeout_s = 0.0
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(limits.connect_timeout_s)
            self._socket.connect(parse_socket_path(address))
        except OSError as error:
            self.close()
            raise PeerUnavailable(address, error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise
        # The kernel's own timeouts: Python's would add one poll before each call.
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(limits.send_timeout_s))
        self._counts.peers_connected = 1

    @property
    def connected(self) -> bool:
        """Whether neither end has closed, as far as this end has noticed."""
        return self._socket is not None

    def send(self, payload: bytes) -> None:
        """Write one message whole.

        Raises `FrameOversized`, `PeerUnavailable`, and `DeadlineExceeded` when the peer has not read for
        `send_timeout_s`: the connection is then closed, since half a message may be on it.
        """
        check_message_size(payload, self._limits.message_bytes_max)
        sock = self._socket
        if sock is None:
            self._counts.sends_unreachable += 1
            raise PeerUnavailable(self.address, "the connection is closed")
        try:
            sock.sendall(prefix_length(payload))
        except BlockingIOError as error:
            self._counts.sends_full += 1
            self._lose()
            raise DeadlineExceeded("room to send", "send_timeout_s", self._limits.send_timeout_s) from error
        except OSError as error:
            self._counts.sends_unreachable += 1
            self._lose()
            raise PeerUnavailable(self.address, error.strerror or str(error)) from error
        self._counts.count_send(SendResult.SENT, len(payload))

    def receive(self, timeout_s: float) -> bytes:
        """The next message. `timeout_s` 0 takes only what has already arrived.

        Raises `DeadlineExceeded` (nothing is lost: call again) and, after the last message, `PeerUnavailable`.
        """
        if self._received:
            return self._received.popleft()
        remaining_s = timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            if self._splitter.refused_bytes is not None:
                self._refuse(self._splitter.refused_bytes)
            messages = self._splitter.feed(self._read(remaining_s, timeout_s))
            if messages:
                return self._keep_all_but_first(messages)
            remaining_s = max(deadline - time.monotonic(), 0.0)

    def statistics(self) -> LinkStatistics:
        """Counts since the connection was opened."""
        return self._counts.snapshot()

    def close(self) -> None:
        """Close. What `send` wrote stays readable for the peer. Closing twice is harmless."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._counts.peers_connected = 0

    def _keep_all_but_first(self, messages: list[bytes]) -> bytes:
        self._counts.messages_received += len(messages)
        self._counts.bytes_received += sum(map(len, messages))
        first = messages[0]
        if len(messages) > 1:
            self._received.extend(messages[1:])
        return first

    def _refuse(self, size_bytes: int) -> NoReturn:
        if self._socket is not None:
            self._counts.messages_oversized += 1
            self._lose()
        raise PeerUnavailable(self.address, f"message of {size_bytes} bytes, message_bytes_max is exceeded")

    def _read(self, remaining_s: float, timeout_s: float) -> bytes:
        """One read of up to 64 KiB, never empty, waiting at most `remaining_s`."""
        sock = self._socket
        if sock is None:
            raise PeerUnavailable(self.address, "the connection is closed")
        flags = 0
        if remaining_s < _TIMEOUT_SHORTEST_S:
            flags = socket.MSG_DONTWAIT
        elif remaining_s != self._receive_timeout_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(remaining_s))
            self._receive_timeout_s = remaining_s
        try:
            chunk = sock.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError as error:
            raise DeadlineExceeded(f"message from {self.address}", "timeout_s", timeout_s) from error
        except OSError as error:
            self._lose()
            raise PeerUnavailable(self.address, error.strerror or str(error)) from error
        if not chunk:
            self._counts.messages_malformed += self._splitter.partial_bytes > 0
            self._lose()
            raise PeerUnavailable(self.address, "closed by the peer")
        return chunk

    def _lose(self) -> None:
        if self._socket is not None:
            self._counts.peers_lost += 1
            self.close()
