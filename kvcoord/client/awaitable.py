"""What the async client returns and one can await: leases, load-backs, pending outcomes.

Whoever awaits only looks on: cancelling it changes nothing of the copy or the operation. Every wait ends after the
client's `call_timeout_s` with DeadlineExceeded.
"""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol, Self, overload

from kvcoord.client.progress import Landing, PendingOutcome, Watched, missing
from kvcoord.client.results import GrantedLease, Holder, Loading, StartedLoad, layers_needed
from kvcoord.domain import OperationId
from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.protocol.local import Acquired, Loaded, Outcome


class Pending(PendingOutcome):
    """The outcome of an operation put off to a later round: `await pending`, while some task goes on to advance."""

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


class LeaseHolder(Holder, Protocol):
    """What a lease asks of its client."""

    async def release(self, lease: "Lease") -> None: ...

    async def write_lease(self, lease: "Lease", *, deferred: bool = True) -> Pending: ...


class Lease(GrantedLease):
    """A path held on the device until it is released: `async with lease` does that. False when aborted."""

    __slots__ = ("_client", "_limit_s")

    def __init__(
        self, answer: Acquired, landings: tuple[Landing, ...], client: LeaseHolder, asked: int, limit_s: float
    ) -> None:
        super().__init__(answer, landings, client, asked)
        self._client = client
        self._limit_s = limit_s

    async def layer(self, index: int) -> None:
        """Wait until layer `index` of every loaded page is on the device.

        Raises TransferFailed when the copy failed before it, LoadRetracted once an `advance` has told that it failed on
        some rank (what was computed from these pages is void, here too: release and acquire again), UsageError when
        there is no such layer or lease.
        """
        await landed(self, index, self._limit_s)

    async def landed(self) -> None:
        """As `layer`, for all layers."""
        await landed(self, None, self._limit_s)

    @overload
    async def write_through(self, *, deferred: Literal[False] = False) -> Outcome: ...

    @overload
    async def write_through(self, *, deferred: Literal[True]) -> Pending: ...

    async def write_through(self, *, deferred: bool = False) -> Outcome | Pending:
        """Publish the pages that the engine had to compute, and copy them to the host. Once, before `release`.

        Not deferred it returns when the outcome is known: with a later `advance` of another task if the path's loads
        have not ended on all ranks yet, or if the group's steps cannot wait for a vote.
        """
        pending = await self._client.write_lease(self, deferred=deferred)
        return pending if deferred else await pending

    async def release(self) -> None:
        """The engine no longer reads these pages. Does nothing for a lease that is not `held`."""
        await self._client.release(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            await self.release()
        except PeerUnavailable:
            if error is None:
                raise


class Load(StartedLoad):
    """A load-back under way: `await load` for all of it, `await load.layer(index)` for one layer."""

    __slots__ = ("_limit_s",)

    def __init__(self, answer: Loaded, landings: tuple[Landing, ...], limit_s: float) -> None:
        super().__init__(answer, landings)
        self._limit_s = limit_s

    async def layer(self, index: int) -> None:
        """Wait until layer `index` of every page is on the device.

        Raises TransferFailed when the copy failed before it, LoadRetracted once an `advance` has told that it failed on
        some rank, UsageError when there is no such layer or it was aborted.
        """
        await landed(self, index, self._limit_s)

    def __await__(self) -> Generator[Any, None, None]:
        return landed(self, None, self._limit_s).__await__()


async def landed(loading: Loading, layer: int | None, limit_s: float) -> None:
    """Wait until `layer` of all pages is there, None for all layers."""
    layers = layers_needed(loading, layer)
    landing = missing(loading.landings, layers)
    if landing is None:
        return
    async with bounded(f"copy of {loading.operation}", limit_s):
        while landing is not None:
            await change_of(landing)
            landing = missing(loading.landings, layers)


async def change_of(watched: Watched) -> None:
    """Wait for the next change."""
    changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not changed.done():
            changed.set_result(None)

    watched.watch(wake)
    try:
        await changed
    finally:
        watched.unwatch(wake)


@asynccontextmanager
async def bounded(waiting_for: str, limit_s: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the body takes longer than the client's `call_timeout_s`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(waiting_for, "call_timeout_s", limit_s) from None
