"""The receiving queue of a loopback endpoint. Knows no peers and no limits."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Notice:
    """A thing to do between two batches."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class Inbox(Generic[Item]):
    """What was sent to one endpoint: messages in batches and notices between them, in order, one batch a loop turn."""

    def __init__(self, deliver: Callable[[list[Item]], None], batch_messages_max: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._batch_messages_max = batch_messages_max
        self._queue: deque[Item | Notice] = deque()
        self._scheduled = False
        self._closed = False

    def put(self, entry: Item | Notice) -> None:
        """Append; after `close`, do nothing."""
        if self._closed:
            return
        self._queue.append(entry)
        self._schedule()

    def drop(self, unwanted: Callable[[Item], bool]) -> None:
        """Forget the messages that match."""
        self._queue = deque(entry for entry in self._queue if isinstance(entry, Notice) or not unwanted(entry))

    def close(self) -> None:
        """Forget everything and deliver nothing more."""
        self._closed = True
        self._queue.clear()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        batch: list[Item] = []
        while self._queue and len(batch) < self._batch_messages_max:
            entry = self._queue[0]
            if isinstance(entry, Notice):
                if not batch:
                    self._queue.popleft()
                    entry.run()
                break
            self._queue.popleft()
            batch.append(entry)
        if self._queue:
            self._schedule()
        if batch:
            self._deliver(batch)
