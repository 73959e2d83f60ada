"""A line between two processes that can be cut or frozen: a proxy for one Unix socket. Knows nothing of what passes."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 64 << 10


class LinkState(StrEnum):
    """What a link lets pass. `UP_FROZEN` is one-way: what the listening side's peers say is held back."""

    OPEN = "open"
    CUT = "cut"
    FROZEN = "frozen"
    UP_FROZEN = "up frozen"
    DOWN_FROZEN = "down frozen"


class Link:
    """Whoever connects to `listen` reaches the server at `target`, as long as the link is open.

    Cut, connections break and new ones are refused. Frozen, they stay and bytes wait.
    """

    def __init__(self, listen: Path, target: Path) -> None:
        self.state = LinkState.OPEN
        self._listen, self._target = listen, target
        self._server: asyncio.Server | None = None
        self._open: set[StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._up.set()
        self._down.set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._listen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self.set(LinkState.CUT)
            await self._server.wait_closed()
            if self._serving:
                await asyncio.wait(self._serving)
            self._listen.unlink(missing_ok=True)

    def set(self, state: LinkState) -> None:
        """From now on."""
        self.state = state
        for flows, frozen in ((self._up, LinkState.UP_FROZEN), (self._down, LinkState.DOWN_FROZEN)):
            if state in (LinkState.FROZEN, frozen):
                flows.clear()
            else:
                flows.set()
        if state is LinkState.CUT:
            for writer in list(self._open):
                writer.transport.abort()

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self.state is LinkState.CUT:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._open |= ends
        pumps = [
            asyncio.ensure_future(_pump(reader, back, self._up)),
            asyncio.ensure_future(_pump(there, writer, self._down)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)


async def _pump(source: StreamReader, sink: StreamWriter, flows: asyncio.Event) -> None:
    """Until either end is gone."""
    with suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            await flows.wait()
            sink.write(chunk)
            await sink.drain()
