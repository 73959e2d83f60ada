"""Brings news from threads to a loop: however much there is to tell, the loop is woken once for it.

It does not know what the news is.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Wakeup:
    """Has the loop call `listen` soon after one or many calls of the two `wake` methods."""

    __slots__ = ("_listen", "_loop", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop, listen: Callable[[], None]) -> None:
        self._loop = loop
        self._listen = listen
        self._scheduled = False

    def wake(self) -> None:
        """From the loop's own thread."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._called)

    def wake_from_thread(self) -> None:
        """From any other thread, after it has written down what there is to tell."""
        # The loop clears the flag before it listens, so what was written before reading a set flag is heard.
        if not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # The loop was closed before its engine; nobody is left to be told.
                self._loop.call_soon_threadsafe(self._called)

    def _called(self) -> None:
        self._scheduled = False
        self._listen()
