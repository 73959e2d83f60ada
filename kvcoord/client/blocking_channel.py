"""A session over a blocking socket. Knows calls and bytes, not what they mean. No threads, no event loop.

Calls are queued until somebody waits for one, or `flush` is called: all of them travel as one message. Whoever waits
reads, and settles whatever is answered meanwhile. One thread uses a channel at a time.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvcoord.client.failures import fresh, name_of
from kvcoord.client.options import ClientOptions
from kvcoord.client.progress import Landing
from kvcoord.client.session import Asked, Session
from kvcoord.errors import DeadlineExceeded, KvcoordError, PeerUnavailable
from kvcoord.protocol.local import Answer, Call
from kvcoord.transport.blocking import BlockingUnixConnection

T = TypeVar("T")


class Ticket(Asked[T]):
    """A call that was queued. `wait` sends everything queued and returns this call's result."""

    __slots__ = ("_channel", "_done", "_error", "_result")

    def __init__(
        self,
        call: Call,
        read: Callable[[Asked[T], Answer], T],
        landing: Landing | None,
        channel: "BlockingChannel",
    ) -> None:
        super().__init__(call, read, landing)
        self._channel = channel
        self._done = False
        self._error: KvcoordError | None = None
        self._result: T | None = None

    def done(self) -> bool:
        """Has the answer been read, or been given up? Reads nothing itself."""
        return self._done

    def wait(self) -> T:
        """The result, or the error of this call, every time it is called.

        Raises DeadlineExceeded when the answer is not there within `call_timeout_s`; it is then given up.
        """
        if not self._done:
            self._channel.flush()
            try:
                self._channel.read_until(self.done, lambda: f"answer to {name_of(self.call)}")
            except DeadlineExceeded as error:
                self.fail(error)
        if self._error is not None:
            raise fresh(self._error)
        return cast(T, self._result)

    def settle(self, result: T) -> bool:
        if self._done:
            return False
        self._result = result
        self._done = True
        return True

    def fail(self, error: KvcoordError) -> None:
        if not self._done:
            self._error = error
            self._done = True


class BlockingChannel:
    """Connects when made. Raises PeerUnavailable when nobody serves there, ConfigError when the address is none."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self.session = Session(address, options.message_bytes_max, options.calls_open_max)
        self._limit_s = options.call_timeout_s
        self._connection = BlockingUnixConnection(address, options.link_limits())

    def ask(self, call: Call, read: Callable[[Asked[Any], Answer], T], landing: Landing | None = None) -> Ticket[T]:
        """Queues one call."""
        ticket = Ticket(call, read, landing, self)
        self.session.ask(ticket)
        return ticket

    def answered(self, call: Call, result: T) -> Ticket[T]:
        """A ticket for what needs no call."""
        ticket: Ticket[T] = Ticket(call, lambda asked, answer: result, None, self)
        ticket.settle(result)
        return ticket

    def flush(self) -> None:
        """Sends what is queued. When the worker is gone all that is open fails, and says so when waited for."""
        if self.session.queued:
            for payload in self.session.outgoing():
                try:
                    self._connection.send(payload)
                except (PeerUnavailable, DeadlineExceeded) as error:
                    self._lose(error.cause if isinstance(error, PeerUnavailable) else str(error))
                    return

    def read_until(self, ready: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Reads answers until `ready`, or the worker is gone. Raises DeadlineExceeded after `call_timeout_s`."""
        remaining_s = self._limit_s
        deadline = time.monotonic() + remaining_s
        while not ready() and not self.session.lost:
            try:
                payload = self._connection.receive(remaining_s)
            except DeadlineExceeded:
                raise DeadlineExceeded(waiting_for(), "call_timeout_s", self._limit_s) from None
            except PeerUnavailable as error:
                self._lose(error.cause)
                return
            self.session.receive(payload)
            remaining_s = max(deadline - time.monotonic(), 0.0)

    def close(self) -> None:
        """Send what is queued and end the session. Twice is harmless."""
        self.flush()
        self._lose("this client is closed: connect again")

    def _lose(self, cause: str) -> None:
        self.session.lose(cause)
        self._connection.close()
