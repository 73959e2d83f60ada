"""The async client: what an engine with an event loop imports.

What is asked within one turn of the event loop travels as one message; results never depend on that. Cancelling
whoever awaits an answer never breaks the session: the call stands, its late answer is dropped, and a lease or slots
that nobody will see are given back. In lockstep, cancel the same calls on all ranks or none: what a cancelled acquire
gives back, it gives back when its answer comes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, overload

from kvcoord.client import arguments, reading
from kvcoord.client.arguments import DeviceSlots
from kvcoord.client.awaitable import Lease, Load, Pending
from kvcoord.client.options import ClientOptions
from kvcoord.client.progress import Landing
from kvcoord.client.registration import close_pages, create_pages, register_of
from kvcoord.client.results import Allocation, Match, expect
from kvcoord.client.session import Asked, Session
from kvcoord.domain import Agreement, OperationId, PageKey, Rank, Reason, Tier
from kvcoord.errors import KvcoordError, UsageError
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedPages
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol import local
from kvcoord.protocol.local import Acquired, Advanced, Answer, Loaded, Opened, Outcome
from kvcoord.transport.link import SendResult
from kvcoord.transport.unix import UnixConnection, UnixTransport

T = TypeVar("T")

_ROOM_INTERVAL_S = 0.005
"""How often a full socket is tried again."""


class _Waiting(Asked[T]):
    """A call with a future. Nobody wants the answer once the future is done: cancelled, or failed by its deadline."""

    __slots__ = ("future",)

    future: asyncio.Future[T]

    def settle(self, result: T) -> bool:
        if self.future.done():
            return False
        self.future.set_result(result)
        return True

    def fail(self, error: KvcoordError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class CacheClient:
    """One session of an engine with its sidecar. Open it with `kvcoord.connect`.

    Every call may raise PeerUnavailable (the worker is gone), DeadlineExceeded (no answer within `call_timeout_s`),
    what the worker raised (GroupLost, Diverged, JoinRefused ...), and UsageError for arguments that can never work.
    """

    def __init__(self, address: str, options: ClientOptions) -> None:
        self.address = address
        self.info: Opened
        """The group, its geometry, and this rank's pools."""
        self.device: list[PageMemory] = []
        """Device memory of each pool once it is registered: the engine fills and reads its pages."""
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._session = Session(address, options.message_bytes_max, options.calls_open_max)
        self._connection: UnixConnection | None = None
        self._unsent: deque[bytes] = deque()
        self._flushing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._pages: list[SharedPages] = []
        self._layer_count = 0

    # --- what is cached -------------------------------------------------------------------------------------------

    async def match(self, page_keys: Sequence[PageKey]) -> Match:
        """What of this path is cached? Changes nothing."""
        return await self._ask(local.Match(arguments.keys_of(page_keys)), reading.read_match)

    async def acquire(self, page_keys: Sequence[PageKey], *, landed: bool = True) -> Lease:
        """Hold a path on the device: keep what is there, load back what is on the host, slots for the rest.

        With `landed` it returns when this rank's copy is over, else when the outcome is known. `lease.error` or
        `await lease.landed()` say whether the copy failed.
        """
        call = local.Acquire(arguments.keys_of(page_keys), bool(landed))
        return await self._ask(call, self._read_lease, Landing(self._layer_count))

    async def release(self, lease: Lease) -> None:
        """As `lease.release`."""
        if lease.number and not lease.released:
            lease.released = True
            await self._ask(local.Release(lease.number), reading.read_done)

    async def write_lease(self, lease: Lease, *, deferred: bool = True) -> Pending:
        """As `lease.write_through`, without waiting for an outcome that comes with a later `advance`."""
        if not lease.number or lease.released:
            raise UsageError("lease", lease.number, "is not held: it was aborted, or released before it was written")
        return await self._ask(local.WriteThrough(lease=lease.number, deferred=bool(deferred)), self._read_pending)

    # --- pages of the engine's own --------------------------------------------------------------------------------

    async def allocate(self, count: int) -> Allocation:
        """Device slots for `count` pages that have no key yet, in every pool: all or none, on all ranks or none."""
        call = local.Allocate(arguments.count_of("count", count, "allocate a number of pages that is not negative"))
        return await self._ask(call, reading.read_allocation)

    async def free(self, device_slots: DeviceSlots) -> None:
        """Give back slots from `allocate` that were not used."""
        await self._ask(local.Free(arguments.slots_of(device_slots, self.info)), reading.read_done)

    @overload
    async def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: Literal[False] = False,
    ) -> Outcome: ...

    @overload
    async def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: Literal[True],
    ) -> Pending: ...

    async def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: bool = False,
    ) -> Outcome | Pending:
        """Publish the last pages of a path, computed in these slots, and copy them to the host as the policy says.

        The slots then belong to the cache. An engine without lockstep keeps them, and names the `operation` alike on
        all ranks. `deferred` does not wait for a vote: the outcome comes with a later `advance`.
        """
        slots = arguments.slots_of(device_slots, self.info, len(page_keys))
        named = arguments.operation_of(operation)
        call = local.WriteThrough(arguments.keys_of(page_keys), slots, 0, named, bool(deferred))
        pending = await self._ask(call, self._read_pending)
        return pending if deferred else await pending

    async def load_back(
        self, page_keys: Sequence[PageKey], device_slots: DeviceSlots, *, operation: OperationId = ""
    ) -> Load:
        """Copy the pages of a path that are on the host, and not on the device, into the first of these slots.

        Returns when the outcome is known; `await load.layer(index)` and `await load` follow the copy.
        """
        slots = arguments.slots_of(device_slots, self.info)
        call = local.LoadBack(arguments.keys_of(page_keys), slots, arguments.operation_of(operation))
        return await self._ask(call, self._read_load, Landing(self._layer_count))

    # --- the group ------------------------------------------------------------------------------------------------

    async def advance(self, step: int) -> Advanced:
        """A lockstep engine begins step `step`: applies the verdict that is due, sends this step's frame."""
        number = arguments.count_of("step", step, "number the steps from 0")
        return await self._ask(local.Advance(number), reading.read_advanced)

    async def evict(self, tier: Tier | str, count: int) -> int:
        """Take up to `count` pages off a tier, the same on every rank. Returns how many went."""
        number = arguments.count_of("count", count, "evict a number of pages that is not negative")
        return await self._ask(local.Evict(arguments.tier_of(tier), number), reading.read_evicted)

    @overload
    async def agree(
        self,
        operation: OperationId,
        yes: bool,
        *,
        agreement: Agreement | str = Agreement.ALL,
        value: int | Sequence[PageKey] | None = None,
        participants: Iterable[Rank] = (),
        reason: Reason | str | None = None,
        shortfall: Mapping[str, int] | None = None,
        deferred: Literal[False] = False,
    ) -> Outcome: ...

    @overload
    async def agree(
        self,
        operation: OperationId,
        yes: bool,
        *,
        agreement: Agreement | str = Agreement.ALL,
        value: int | Sequence[PageKey] | None = None,
        participants: Iterable[Rank] = (),
        reason: Reason | str | None = None,
        shortfall: Mapping[str, int] | None = None,
        deferred: Literal[True],
    ) -> Pending: ...

    async def agree(
        self,
        operation: OperationId,
        yes: bool,
        *,
        agreement: Agreement | str = Agreement.ALL,
        value: int | Sequence[PageKey] | None = None,
        participants: Iterable[Rank] = (),
        reason: Reason | str | None = None,
        shortfall: Mapping[str, int] | None = None,
        deferred: bool = False,
    ) -> Outcome | Pending:
        """Vote on something of the engine's own, under an id that is never used again.

        `value` goes with a yes: an int for MIN, MAX and EQUAL, keys for INTERSECT. `participants` are ranks, none for
        all. `deferred`: the outcome comes with a later `advance`.
        """
        call = arguments.agree_of(
            self.info, operation, yes, agreement, value, participants, reason, shortfall, deferred
        )
        pending = await self._ask(call, self._read_pending)
        return pending if deferred else await pending

    async def status(self) -> WorkerSnapshot:
        """What the worker shows of itself."""
        return await self._ask(local.Status(), reading.read_status)
