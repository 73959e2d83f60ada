"""The life of one process: event loop, signals, the word that it is ready, an end that always comes.

    run(main) --> main(stop) serves --stop.ready()--> ... --SIGTERM or SIGINT--> stop.wait() returns --> main returns
                                                                 |
                                     shutdown_timeout_s later, or at a second signal: the process ends at once

SIGUSR1 writes the flight recorder to a file and prints its path. This module knows nothing of what a process does.
"""

import asyncio
import ctypes
import gc
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType
from typing import Final, NoReturn

import msgspec
import uvloop

from kvcoord.errors import JoinRefused, PeerUnavailable, UsageError
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.dumps import Dumps
from kvcoord.runtime.exits import Exit, cause_of, report

_STANDARD_ERROR: Final = 2
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""`PR_SET_PDEATHSIG` of Linux's prctl."""


class Ready(msgspec.Struct, frozen=True):
    """The line that a process writes once it serves. `http` is empty when it has no such port."""

    ready: bool
    addresses: list[str]
    http: str


class Stop:
    """What `main` is handed: when to stop, and whom to tell that it is ready. Used on the event loop.

    `on_ready` is called when everything is open. A stop that a test or another program makes needs no arguments.
    """

    def __init__(self, ready_fd: int | None = None, on_ready: Callable[[], None] | None = None) -> None:
        self.cause = ""
        self.recorder: FlightRecorder | None = None
        self.dumps: Dumps | None = None
        self._ready_fd = ready_fd
        self._on_ready = on_ready
        self._asked = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Whether the process was asked to stop."""
        return self._asked.is_set()

    def request(self, cause: str) -> None:
        """Ask the process to stop in good order. The first cause counts."""
        if not self.requested:
            self.cause = cause
            self._asked.set()

    async def wait(self) -> None:
        """Return once the process was asked to stop."""
        await self._asked.wait()

    def watch(self, recorder: FlightRecorder, directory: str | None = None) -> None:
        """The flight recorder to write out on SIGUSR1, and when the process fails, into this folder."""
        self.recorder = recorder
        self.dumps = Dumps(recorder, directory)

    def ready(self, addresses: Sequence[str], http: str = "") -> None:
        """Everything is open. Tells whoever started the process, if asked to, in one line of JSON.

        Raises PeerUnavailable when nobody reads that line any more.
        """
        if self._on_ready is not None:
            self._on_ready()
        if self._ready_fd is None:
            return
        line = msgspec.json.encode(Ready(True, list(addresses), http)) + b"\n"
        try:
            os.write(self._ready_fd, line)
        except OSError as error:
            cause = f"whoever started this process does not read the ready line ({error.strerror})"
            raise PeerUnavailable(f"file descriptor {self._ready_fd}", cause) from error


Main = Callable[[Stop], Awaitable[int]]


def run(main: Main, *, shutdown_timeout_s: float, ready_fd: int | None = None, exit_with_parent: bool = False) -> int:
    """Run `main` on an event loop of its own until it returns. Returns its exit code, or the one of its error.

    An error of this package is one line on standard error. `ready_fd`: where the ready line goes. `exit_with_parent`:
    the process is asked to stop when the thread that started it ends, however it ends. Call it from the main thread.
    """
    if exit_with_parent:
        _follow_parent()
    stop = Stop(ready_fd, _keep_out_of_garbage_collection)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with _Shutdown(runner.get_loop(), stop, shutdown_timeout_s), runner:
        try:
            return runner.run(_call(main, stop))
        except Exception as error:
            cause = cause_of(error)
            if stop.dumps is not None and not isinstance(cause, UsageError | JoinRefused):
                stop.dumps.write(str(cause or error))
            if cause is None:
                raise
            return report(cause)


async def _call(main: Main, stop: Stop) -> int:
    return await main(stop)


def _keep_out_of_garbage_collection() -> None:
    """What exists once the process serves stays for its life: no collection need look at it again."""
    gc.collect()
    gc.freeze()


class _Shutdown:
    """Turns signals into a stop, and a stop that takes too long into an end.

    A thread keeps the time and the handlers are Python's own, so that a blocked event loop ends as well.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: Stop, timeout_s: float) -> None:
        self._loop, self._stop, self._timeout_s = loop, stop, timeout_s
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._former: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> None:
        threading.Thread(target=self._keep_time, name="shutdown", daemon=True).start()
        for number, handler in ((signal.SIGINT, self._end), (signal.SIGTERM, self._end), (signal.SIGUSR1, self._show)):
            self._former[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._ended.set()
        self._asked.set()

    def _end(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked.is_set():
            _exit_now(f"{name} came while stopping: ended at once")
        self._asked.set()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.request, name)

    def _show(self, number: int, _: FrameType | None) -> None:
        if self._stop.dumps is not None:
            self._stop.dumps.write(signal.Signals(number).name)

    def _keep_time(self) -> None:
        self._asked.wait()
        if not self._ended.wait(self._timeout_s):
            _exit_now(f"not stopped within shutdown_timeout_s={self._timeout_s:g} s: ended at once")


def _exit_now(cause: str) -> NoReturn:
    os.write(_STANDARD_ERROR, f"kvcoord: {cause}\n".encode())
    os._exit(Exit.FAILURE)


def _follow_parent() -> None:
    """Ask the kernel for a SIGTERM at the parent's end: nothing to poll, and it also comes after a SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0) != 0:
        cause = os.strerror(ctypes.get_errno())
        raise UsageError("exit_with_parent", True, f"the kernel cannot tell when the parent ends ({cause})")
