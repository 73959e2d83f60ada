"""A session over a socket of the event loop. Knows calls and bytes, not what they mean.

What is asked within one turn of the loop is sent at its end, in the order in which it was asked.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvcoord.client.options import ClientOptions
from kvcoord.client.progress import Landing
from kvcoord.client.session import Asked, Session
from kvcoord.errors import KvcoordError
from kvcoord.protocol.local import Answer, Call
from kvcoord.transport.link import SendResult
from kvcoord.transport.unix import UnixConnection, UnixTransport

T = TypeVar("T")

ROOM_INTERVAL_S = 0.005
"""How often a full socket is tried again; calls that wait for room have their deadline all the same."""


class _Waiting(Asked[T]):
    """A call with a future. Nobody wants the answer once the future is done: cancelled, or failed at its deadline."""

    __slots__ = ("future",)

    def __init__(
        self,
        call: Call,
        read: Callable[[Asked[T], Answer], T],
        landing: Landing | None,
        future: asyncio.Future[T],
    ) -> None:
        super().__init__(call, read, landing)
        self.future = future

    def settle(self, result: T) -> bool:
        if self.future.done():
            return False
        self.future.set_result(result)
        return True

    def fail(self, error: KvcoordError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Channel:
    """Asks and answers until it is closed or the worker is gone. All on the event loop that made it."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self.session = Session(address, options.message_bytes_max, options.calls_open_max)
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._connection: UnixConnection | None = None
        self._unsent: deque[bytes] = deque()
        self._flushing: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect. Raises PeerUnavailable when nobody serves there, ConfigError when the address cannot be one."""
        self._connection = await UnixTransport().open_connection(
            self.session.address,
            b"engine",
            on_batch=self._received,
            on_connected=self._schedule,
            on_lost=self._lost,
            limits=self._options.link_limits(),
        )

    async def close(self) -> None:
        """Send what was asked, for at most the linger time, and end the session. Twice is harmless."""
        self._flush()
        self._lost("this client is closed: connect again")
        for handle in (self._alarm, self._flushing):
            if handle is not None:
                handle.cancel()
        if self._connection is not None:
            await self._connection.close()

    async def ask(self, call: Call, read: Callable[[Asked[Any], Answer], T], landing: Landing | None = None) -> T:
        """One call and its answer. Cancelled, the call stands, and what it is granted is given back."""
        future: asyncio.Future[T] = self._loop.create_future()
        asked = _Waiting(call, read, landing, future)
        asked.deadline = self._loop.time() + self._options.call_timeout_s
        self.session.ask(asked)
        self._schedule()
        if self._alarm is None:
            self._alarm = self._loop.call_at(asked.deadline, self._rang)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self.session.give_back(future.result())
                self._schedule()
            raise

    def _schedule(self) -> None:
        """Send at the end of this turn of the loop, if there is something to send."""
        if self._flushing is None and self.session.queued:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        connection = self._connection
        if connection is None:
            return
        self._unsent.extend(self.session.outgoing())
        while self._unsent:
            result = connection.send(self._unsent[0])
            if result is SendResult.UNREACHABLE:
                return
            if result is SendResult.FULL:
                self._flushing = self._loop.call_later(ROOM_INTERVAL_S, self._flush)
                return
            self._unsent.popleft()

    def _received(self, batch: list[bytes]) -> None:
        for payload in batch:
            self.session.receive(payload)
        self._schedule()

    def _lost(self, cause: str) -> None:
        self.session.lose(cause)
        self._unsent.clear()

    def _rang(self) -> None:
        """Fails the calls whose time is up."""
        following = self.session.expire(self._loop.time(), self._options.call_timeout_s)
        self._alarm = None if following is None else self._loop.call_at(following, self._rang)
