"""Child processes of kvcoord: started, awaited until they serve, ended together. Knows no command's options.

Each child has a session of its own, so that ctrl-C on a terminal reaches the parent alone, which ends them in order;
and it ends by itself when the parent is killed.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.runtime.process import Ready

START_TIMEOUT_S: Final = 30.0
"""From starting a child until it serves."""

_READY: Final = msgspec.json.Decoder(Ready)


class Children:
    """The children of this process, in generations that were started together. The youngest end first.

        async with Children(end_timeout_s=10.0) as children:
            [ready] = await children.start({"coordinator": ["coordinator", "--bind", address]})
            name, code = await children.wait_ended()

    `end_timeout_s`: a generation that was asked to end and has not is killed after this. Its diagnostics go to this
    process's standard error.
    """

    def __init__(self, end_timeout_s: float) -> None:
        self._end_timeout_s = end_timeout_s
        self._generations: list[dict[str, asyncio.subprocess.Process]] = []
        self._waits: dict[asyncio.Task[int], str] = {}

    async def __aenter__(self) -> "Children":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, commands: Mapping[str, Sequence[str]]) -> list[Ready]:
        """Start one generation: arguments of `kvcoord` by the name of the child. Returns what each serves, in order.

        Raises PeerUnavailable when one ends before it serves, DeadlineExceeded when it takes too long; all of this
        process's children should then be closed.
        """
        generation: dict[str, asyncio.subprocess.Process] = {}
        self._generations.append(generation)
        for name, arguments in commands.items():
            generation[name] = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "kvcoord", *arguments, "--print-ready", "--exit-with-parent"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._waits[asyncio.create_task(process.wait())] = name
        waiting = [asyncio.create_task(_ready(name, process)) for name, process in generation.items()]
        try:
            return await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    async def wait_ended(self) -> tuple[str, int]:
        """Return when a child has ended by itself: its name and exit code, negative for a signal."""
        done, _ = await asyncio.wait(self._waits, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in self._waits if task in done)
        return self._waits[first], first.result()

    async def close(self) -> None:
        """End every child: in good order, or killed."""
        for generation in reversed(self._generations):
            for process in generation.values():
                _send(process, signal.SIGTERM)
            ending = [task for task, name in self._waits.items() if name in generation]
            if ending:
                await asyncio.wait(ending, timeout=self._end_timeout_s)
            for process in generation.values():
                _send(process, signal.SIGKILL)
        if self._waits:
            await asyncio.wait(self._waits)
        self._generations.clear()
        self._waits.clear()


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        try:
            process.send_signal(number)
        except ProcessLookupError:
            return


async def _ready(name: str, process: asyncio.subprocess.Process) -> Ready:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
            if line:
                return _READY.decode(line)
            code = await process.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(f"ready line of {name}", "START_TIMEOUT_S", START_TIMEOUT_S) from error
    except msgspec.DecodeError as error:
        raise PeerUnavailable(name, f"said something else than that it is ready: {error}") from error
    raise PeerUnavailable(name, f"ended with {ending(code)} before it was ready")


def ending(code: int) -> str:
    """An exit code in words; negative for a signal."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
