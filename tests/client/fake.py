"""A worker on the test's event loop: it answers what the test says, when the test says it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import Answer, Answers, Call, Failed, FromEngine, Landed, Open, Opened
from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.unix import UnixListener, UnixTransport
from tests.client.values import INFO

C = TypeVar("C", bound=Call)

LIMITS = LinkLimits(message_bytes_max=4 << 20, queue_bytes_max=16 << 20)


class FakeWorker:
    """One engine at a time. `messages` are the calls of each message after Open, in order of arrival."""

    def __init__(self, opened: Opened | Failed | None) -> None:
        self.messages: list[list[Call]] = []
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self._opened = opened
        self._calls: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine, LIMITS.message_bytes_max)
        self._peer = b""
        self.listener: UnixListener

    def take(self, batch: list[tuple[bytes, bytes]]) -> None:
        for peer, payload in batch:
            self._peer = peer
            calls = self._decoder.decode(payload).calls
            if isinstance(calls[0][1], Open):
                if self._opened is not None:
                    self.answer((calls[0][0], self._opened))
                continue
            self.messages.append([call for _, call in calls])
            for numbered in calls:
                self._calls.put_nowait(numbered)

    async def expect(self, kind: type[C]) -> tuple[int, C]:
        """The next call, which is of this kind."""
        number, call = await self._calls.get()
        assert isinstance(call, kind)
        return number, call

    def answer(self, *answers: tuple[int, Answer]) -> None:
        """All in one message."""
        self.send(encode(Answers(list(answers))))

    def landed(self, operation: str, layers: int, error: str = "") -> None:
        self.send(encode(Landed(operation, layers, error)))

    def send(self, payload: bytes) -> None:
        assert self.listener.send(self._peer, payload) is SendResult.SENT

    async def kill(self) -> None:
        await self.listener.close(0)


@asynccontextmanager
async def fake_worker(address: str, opened: Opened | Failed | None = INFO) -> AsyncIterator[FakeWorker]:
    """`opened` is what it answers to Open; None: it never does."""
    worker = FakeWorker(opened)
    worker.listener = await UnixTransport().open_listener(
        address, on_batch=worker.take, on_lost=lambda peer, cause: worker.lost.put_nowait(cause), limits=LIMITS
    )
    try:
        yield worker
    finally:
        await worker.kill()
