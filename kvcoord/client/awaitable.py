"""What the async client returns and one can await: leases, load-backs, pending outcomes.

Whoever awaits only looks on: cancelling it changes nothing of the copy or the operation. Every wait ends after the
client's `call_timeout_s` with DeadlineExceeded.
"""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, overload

from kvcoord.client.progress import Landing, PendingOutcome, Watched, missing
from kvcoord.client.results import GrantedLease, StartedLoad, layers_needed
from kvcoord.domain import OperationId
from kvcoord.errors import DeadlineExceeded
from kvcoord.protocol.local import Acquired, Loaded, Outcome


class Pending(PendingOutcome):
    """The outcome of a deferred operation: `await pending` once its round was advanced to, in whatever task."""

    __slots__ = ("_limit_s",)

    def __init__(self, operation: OperationId, outcome: Outcome | None, limit_s: float) -> None:
        super().__init__(operation, outcome)
        self._limit_s = limit_s

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self._wait().__await__()

    async def _wait(self) -> Outcome:
        if not self.done():
            async with bounded(f"outcome of {self.operation}", self._limit_s):
                await change_of(self)
        return self.result()


class Leasing(Protocol):
    """What a lease asks of its client."""

    async def release(self, lease: "Lease") -> None: ...

    async def write_lease(self, lease: "Lease") -> Pending: ...

    async def write_lease_now(self, lease: "Lease") -> Outcome: ...


class Lease(GrantedLease):
    """A path held on the device until it is released: `async with lease` does that. False when aborted."""

    __slots__ = ("_cache", "_limit_s")

    def __init__(self, answer: Acquired, landings: tuple[Landing, ...], cache: Leasing, limit_s: float) -> None:
        super().__init__(answer, landings)
        self._cache = cache
        self._limit_s = limit_s
