"""The processes of a replay: started, watched, and ended together, whatever happens.

A child that ends before it was asked to takes the replay down, with the end of its standard error. Knows nothing of
what the children do.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

import msgspec

from kvcoord.errors import PeerUnavailable
from kvcoord.load.dialogue import EXPLAINED, LINE_BYTES_MAX, line
from kvcoord.runtime.process import Ready

ERROR_LINES_KEPT: Final = 20

END_TIMEOUT_S: Final = 5.0
"""A child that was asked to end is killed after this time."""


class Child:
    """One process. Its standard output is read line by line, its standard error kept for when it fails."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.ending = False
        self._process = process
        self._errors: deque[str] = deque(maxlen=ERROR_LINES_KEPT)
        self._reading = asyncio.create_task(self._read_errors())

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: msgspec.Struct) -> None:
        """One line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line(message))

    async def finish(self) -> None:
        """Ends its standard input and waits for its end. Raises PeerUnavailable when it does not end well."""
        self.ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError as error:
            raise PeerUnavailable(self.name, f"has not ended within {END_TIMEOUT_S:g} s") from error
        if code:
            raise await self.death()

    async def hear(self) -> bytes:
        """The next line of its standard output. Raises PeerUnavailable, with its last words, when it has ended."""
        assert self._process.stdout is not None
        text = await self._process.stdout.readline()
        if not text:
            raise await self.death()
        return text

    async def ready(self) -> None:
        """Returns when it has said that it serves."""
        msgspec.json.decode(await self.hear(), type=Ready)

    async def watch(self) -> None:
        """Returns when it has ended as it was asked to, or has said why. Raises PeerUnavailable when it just died."""
        code = await self._process.wait()
        if not self.ending and code != EXPLAINED:
            raise await self.death()

    async def death(self) -> PeerUnavailable:
        """How it ended, as an error."""
        code = await self._process.wait()
        await self._reading
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "\n".join(self._errors)
        return PeerUnavailable(self.name, f"{how}; its last words:\n{words}" if words else how)

    async def end(self) -> None:
        """Asks it to end, then makes it."""
        self.ending = True
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for text in self._process.stderr:
            self._errors.append(text.decode(errors="replace").rstrip())


class Children:
    """Starts processes, and ends them all when the block is left: the last ones first."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children:
            child.ending = True
        await asyncio.gather(*(child.end() for child in reversed(self._children)))

    async def start(
        self, name: str, arguments: Sequence[str], *, talks: bool = False, descriptors: Sequence[int] = ()
    ) -> Child:
        """`python` with these arguments, out of reach of the terminal's ctrl-C. `talks`: it reads its input."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=PIPE if talks else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=descriptors,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            env=_environment(),
        )
        child = Child(name, process)
        self._children.append(child)
        return child


def _environment() -> dict[str, str]:
    """Without options of kvcoord: those of a replay are all in its plan."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVCOORD_")}
