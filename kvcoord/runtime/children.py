"""Child processes: started, listened to, watched, ended together. Knows nothing of what they do.

Each child has a session of its own, so that ctrl-C on a terminal reaches the parent alone, which ends them in order.
Options of kvcoord in this process's environment do not reach a child unless it is started with `environment`.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

import msgspec

from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.runtime.process import Ready

START_TIMEOUT_S: Final = 30.0
"""From starting a child until it serves."""

END_TIMEOUT_S: Final = 5.0
"""A child that was asked to end is killed after this time, unless `Children` says otherwise."""

ERROR_LINES_KEPT: Final = 20

LINE_BYTES_MAX: Final = 64 << 20
"""Of one line that a child writes to its standard output."""

KVCOORD: Final = ("-m", "kvcoord")

SERVE: Final = ("--print-ready", "--exit-with-parent")
"""Arguments with which a command of kvcoord tells when it serves, and does not outlive its parent."""

_READY: Final = msgspec.json.Decoder(Ready)


class Child:
    """One process. Its standard output is read line by line; of its standard error the end is kept for when it fails.

    `ending`: it was asked to end, so its end is no failure. `expected`: an exit code that is none either, since it
    has explained itself.
    """

    def __init__(self, name: str, process: Process, end_timeout_s: float) -> None:
        self.name = name
        self.ending = False
        self.expected: int | None = None
        self._process = process
        self._end_timeout_s = end_timeout_s
        self._errors: deque[str] = deque(maxlen=ERROR_LINES_KEPT)
        self._reading = None if process.stderr is None else asyncio.create_task(self._read_errors())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def say(self, line: bytes) -> None:
        """One line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    async def hear(self) -> bytes:
        """The next line of its standard output. Raises PeerUnavailable, with its last words, when it has ended."""
        assert self._process.stdout is not None
        text = await self._process.stdout.readline()
        if not text:
            raise await self.death()
        return text

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> Ready:
        """What it serves, once it does. Raises PeerUnavailable when it ends first, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return _READY.decode(await self.hear())
        except TimeoutError as error:
            raise DeadlineExceeded(f"ready line of {self.name}", "START_TIMEOUT_S", timeout_s) from error
        except msgspec.DecodeError as error:
            raise PeerUnavailable(self.name, f"said something else than that it is ready: {error}") from error

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        return await self._process.wait()

    async def watch(self) -> None:
        """Return when it has ended as it was asked to, or as expected. Raises PeerUnavailable when it just died."""
        code = await self._process.wait()
        if not self.ending and code != self.expected:
            raise await self.death()

    async def death(self) -> PeerUnavailable:
        """How it ended, as an error."""
        code = await self._process.wait()
        if self._reading is not None:
            await self._reading
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "\n".join(self._errors)
        return PeerUnavailable(self.name, f"{how}; its last words:\n{words}" if words else how)

    async def finish(self) -> None:
        """End its standard input and wait for its end. Raises PeerUnavailable when it does not end well."""
        self.ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._end_timeout_s):
                code = await self._process.wait()
        except TimeoutError as error:
            raise PeerUnavailable(self.name, f"has not ended within {self._end_timeout_s:g} s") from error
        if code:
            raise await self.death()

    async def end(self) -> None:
        """Ask it to end, then make it. A stopped one is continued first."""
        self.ending = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._end_timeout_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        if self._reading is not None:
            await self._reading

    async def kill(self) -> None:
        """End it without a word, and wait until it is gone."""
        self.ending = True
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for text in self._process.stderr:
            self._errors.append(text.decode(errors="replace").rstrip())


class Children:
    """Starts processes, and ends them all when the block is left: the youngest generation first.

        async with Children() as children:
            [ready] = await children.serve({"coordinator": ["coordinator", "--bind", address]})
            ended = await children.wait_ended()

    `keep_errors`: their standard error is kept for `Child.death`, else it goes to this process's.
    """

    def __init__(self, end_timeout_s: float | None = None, *, keep_errors: bool = False) -> None:
        self._end_timeout_s = end_timeout_s
        self._keep_errors = keep_errors
        self._generations: dict[int, list[Child]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self.all():
            child.ending = True
        for generation in sorted(self._generations, reverse=True):
            await asyncio.gather(*(child.end() for child in self._generations[generation]))
        self._generations.clear()

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        talks: bool = False,
        descriptors: Sequence[int] = (),
        generation: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """`python` with these arguments. `talks`: it reads its input. `descriptors` are inherited.

        `environment` None: this process's without options of kvcoord.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=PIPE if talks else DEVNULL,
            stdout=PIPE,
            stderr=PIPE if self._keep_errors else None,
            pass_fds=descriptors,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            env=_environment() if environment is None else environment,
        )
        child = Child(name, process, END_TIMEOUT_S if self._end_timeout_s is None else self._end_timeout_s)
        self._generations.setdefault(generation, []).append(child)
        return child

    async def serve(self, commands: Mapping[str, Sequence[str]], *, generation: int = 0) -> list[Ready]:
        """Start commands of `kvcoord`, by the name of the child, with this process's environment.

        Returns what each serves, in order. Raises as `Child.ready` does, as soon as one does.
        """
        started = [
            await self.start(name, [*KVCOORD, *words, *SERVE], generation=generation, environment=dict(os.environ))
            for name, words in commands.items()
        ]
        waiting = [asyncio.create_task(child.ready()) for child in started]
        try:
            return await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    def all(self) -> list[Child]:
        """Every child that was started and not forgotten, the oldest generation first."""
        return [child for generation in sorted(self._generations) for child in self._generations[generation]]

    def forget(self, child: Child) -> None:
        """One that has ended, and that another has replaced."""
        for generation in self._generations.values():
            if child in generation:
                generation.remove(child)

    async def wait_ended(self) -> Child:
        """Return one that has ended by itself, once one has."""
        waits = {asyncio.create_task(child.wait()): child for child in self.all()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return next(child for task, child in waits.items() if task in done)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVCOORD_")}


def ending(code: int) -> str:
    """An exit code in words; negative for a signal."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
