"""One Unix stream connection on the event loop, as both of its ends use it: frames in, frames out. Knows no address."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from kvcoord.transport.framing import MessageSplitter, prefix_length
from kvcoord.transport.link import (
    FULL,
    PREFIX_BYTES,
    SENT,
    UNREACHABLE,
    LinkLimits,
    LinkStatistics,
    SendResult,
    check_message_size,
)


class Stream(asyncio.Protocol):
    """Counts into the endpoint's statistics; calls back with batches and, once, with the cause of its end."""

    def __init__(
        self,
        limits: LinkLimits,
        counts: LinkStatistics,
        *,
        on_open: Callable[["Stream"], bool],
        on_messages: Callable[["Stream", list[bytes]], None],
        on_closed: Callable[["Stream", str], None],
    ) -> None:
        """`on_open` says whether the connection is welcome; a refused one is closed without `on_closed`."""
        self.peer = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limits = limits
        self._counts = counts
        self._on_open, self._on_messages, self._on_closed = on_open, on_messages, on_closed
        self._splitter = MessageSplitter(limits.message_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = self._transport.get_extra_info("socket").fileno()
        if self._on_open(self):
            self._counts.peers_connected += 1
            return
        self._counts.peers_refused += 1
        self._silent = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with up to some hundred KiB: what ends in it is one batch."""
        if self._silent:
            return
        message = self._splitter.only(data)
        messages = self._splitter.feed(data) if message is None else [message]
        if messages:
            self._counts.messages_received += len(messages)
            self._counts.bytes_received += sum(map(len, messages))
            self._on_messages(self, messages)
        if self._splitter.refused_bytes is not None and self._transport is not None:
            self._counts.messages_oversized += 1
            self._end(f"message of {self._splitter.refused_bytes} bytes, message_bytes_max is exceeded")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, once, whoever closed."""
        if self._splitter.partial_bytes and self._splitter.refused_bytes is None:
            self._counts.messages_malformed += 1
        self._end(f"connection broke: {exc}" if exc else "closed by the peer")
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, payload: bytes) -> SendResult:
        """As `link.Connection.send`; FULL when `queue_bytes_max` would be exceeded."""
        check_message_size(payload, self._limits.message_bytes_max)
        size_bytes = len(payload)
        transport = self._transport
        if transport is None or transport.is_closing():
            result = UNREACHABLE
        else:
            queued_bytes = transport.get_write_buffer_size()
            if queued_bytes + size_bytes + PREFIX_BYTES > self._limits.queue_bytes_max:
                result = FULL
            else:
                self._write(transport, prefix_length(payload), queued_bytes)
                result = SENT
        self._counts.count_send(result, size_bytes)
        return result

    def finish(self) -> None:
        """Take nothing more in, write out what is queued, then close. `closed` tells when."""
        self._silence()
        if self._transport is not None:
            self._transport.close()
        elif not self.closed.done():
            self.closed.set_result(None)

    def abort(self) -> None:
        """Drop what is queued and close."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, transport: asyncio.Transport, framed: bytes, queued_bytes: int) -> None:
        """Straight into the socket while nothing is queued before it: the event loop would write at its turn's end."""
        if not queued_bytes:
            # No room, or no peer: the event loop waits for the one and finds out about the other.
            with suppress(OSError):
                framed = framed[os.write(self._descriptor, framed) :]
            if not framed:
                return
        transport.write(framed)

    def _end(self, cause: str) -> None:
        """Tell the endpoint that this connection is over, unless it was told or does not want to know."""
        if self._silent:
            return
        self._silence()
        self._counts.peers_lost += 1
        self._on_closed(self, cause)

    def _silence(self) -> None:
        if not self._silent:
            self._silent = True
            self._counts.peers_connected -= 1


async def close_streams(streams: list[Stream], linger_s: float) -> None:
    """Close all, each delivering what it has queued; after `linger_s` what is left is dropped."""
    for stream in streams:
        stream.finish()
    ends = [stream.closed for stream in streams if not stream.closed.done()]
    if not ends:
        return
    _, late = await asyncio.wait(ends, timeout=linger_s)
    if late:
        for stream in streams:
            stream.abort()
        await asyncio.wait(late)
