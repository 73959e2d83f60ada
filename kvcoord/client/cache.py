"""The async client: what an engine with an event loop imports.

What is asked within one turn of the event loop travels as one message; results never depend on that. Cancelling
whoever awaits an answer never breaks the session: the call stands, its late answer is dropped, and a lease or slots
that nobody will see are given back. In lockstep, cancel the same calls on all ranks or none: what a cancelled acquire
gives back, it gives back when its answer comes.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, Unpack, overload

from kvcoord.client import arguments, reading
from kvcoord.client.arguments import DeviceSlots, VoteFields
from kvcoord.client.awaitable import Lease, Load, Pending
from kvcoord.client.channel import Channel
from kvcoord.client.options import (
    CALL_TIMEOUT_S,
    CALLS_OPEN_MAX,
    CONNECT_TIMEOUT_S,
    LINGER_S,
    MESSAGE_BYTES_MAX,
    ClientOptions,
)
from kvcoord.client.progress import Landing
from kvcoord.client.registration import Pages, adopt, close_pages, create_pages, memories_of, register_of
from kvcoord.client.results import Allocation, Match, expect
from kvcoord.client.session import Asked
from kvcoord.domain import OperationId, PageKey, Tier
from kvcoord.errors import UsageError
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedPages
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol import local
from kvcoord.protocol.local import Acquired, Advanced, Answer, Loaded, Opened, Outcome


class CacheClient:
    """One session of an engine with its sidecar. Open it with `kvcoord.connect`.

    Every call may raise PeerUnavailable (the worker is gone), DeadlineExceeded (no answer within `call_timeout_s`),
    what the worker raised (GroupLost, Diverged, JoinRefused ...), and UsageError for arguments that can never work.
    After GroupRenewed every lease of before is void: start afresh, with `register`.
    """

    def __init__(self, address: str, options: ClientOptions) -> None:
        self.address = address
        self.info: Opened
        """The group, its geometry, and this rank's pools."""
        self.device: list[PageMemory] = []
        """Device memory of each pool once it is registered: the engine fills and reads its pages."""
        self._limit_s = options.call_timeout_s
        self._channel = Channel(address, options)
        self._ask = self._channel.ask
        self._own_pages: list[SharedPages] = []
        self._pages: Pages = []
        self._layer_count = 0

    async def open(self) -> None:
        """Connect and open a session. Raises PeerUnavailable when nobody serves there."""
        await self._channel.open()
        self.info = await self._channel.ask(local.Open(local.LOCAL_VERSION), reading.read_opened)
        self._layer_count = max(self.info.layers)

    async def close(self) -> None:
        """End the session and with it every lease; calls without an answer raise PeerUnavailable. Twice is harmless."""
        await self._channel.close()
        self.device = []
        close_pages(self._own_pages)

    @property
    def closed(self) -> bool:
        """Is the session over, closed by either side?"""
        return bool(self._channel.session.lost)

    def voided(self, number: int) -> bool:
        """Has the group begun anew since this call was asked? Leases ask."""
        return self._channel.session.voided(number)

    async def register(self, pages: Pages | None = None, *, model: str = "") -> None:
        """Be the rank's engine: share device memory with the worker, and find it in `device`.

        Without `pages` the memory is made for every pool and closed with this client; pages of the caller's own (one
        for each pool that has layers on this rank, of the group's geometry) stay the caller's to close, after this
        client. After GroupRenewed register again: without `pages` the same memory, whose contents are then of no worth.

        `model` names all that computed pages depend on (weights and their revision, adapters, quantization), alike on
        all ranks: host pages then outlive this engine, for the next one that gives the same name.
        """
        own = create_pages(self.info) if pages is None and not self._pages else []
        shared: Pages = own or self._pages if pages is None else pages
        try:
            adopt(shared, await self._ask(register_of(shared, self.info, model), reading.read_registered))
        except BaseException:
            close_pages(own)
            raise
        self._own_pages += own
        self._pages = shared
        self.device = memories_of(shared)

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
        if lease.held:
            lease.released = True
            await self._ask(local.Release(lease.number), reading.read_done)

    async def write_lease(self, lease: Lease, *, deferred: bool = True) -> Pending:
        """As `lease.write_through`, without waiting for an outcome that comes with a later `advance`."""
        if not lease.held:
            raise UsageError("lease", lease.number, "is not held: aborted, released, or of before the group began anew")
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
        call = arguments.write_of(self.info, page_keys, device_slots, operation, deferred)
        pending = await self._ask(call, self._read_pending)
        return pending if deferred else await pending

    async def load_back(
        self, page_keys: Sequence[PageKey], device_slots: DeviceSlots, *, operation: OperationId = ""
    ) -> Load:
        """Copy the pages of a path that are on the host, and not on the device, into the first of these slots.

        Returns when the outcome is known; `await load.layer(index)` and `await load` follow the copy.
        """
        call = arguments.load_of(self.info, page_keys, device_slots, operation)
        return await self._ask(call, self._read_load, Landing(self._layer_count))

    # --- the group ------------------------------------------------------------------------------------------------

    async def advance(self, step: int) -> Advanced:
        """A lockstep engine begins step `step`: applies the verdict that is due, sends this step's frame.

        `broken` of the answer names leases with pages of a load-back that failed on some rank: they raise LoadRetracted
        where they are waited for, on all ranks, and nothing that was computed from them is published.
        """
        number = arguments.count_of("step", step, "number the steps from 0")
        return await self._ask(local.Advance(number), reading.read_advanced)

    async def evict(self, tier: Tier | str, count: int) -> int:
        """Take up to `count` pages off a tier, the same on every rank. Returns how many went."""
        number = arguments.count_of("count", count, "evict a number of pages that is not negative")
        return await self._ask(local.Evict(arguments.tier_of(tier), number), reading.read_evicted)

    @overload
    async def agree(
        self, operation: OperationId, yes: bool, *, deferred: Literal[False] = False, **vote: Unpack[VoteFields]
    ) -> Outcome: ...

    @overload
    async def agree(
        self, operation: OperationId, yes: bool, *, deferred: Literal[True], **vote: Unpack[VoteFields]
    ) -> Pending: ...

    async def agree(
        self, operation: OperationId, yes: bool, *, deferred: bool = False, **vote: Unpack[VoteFields]
    ) -> Outcome | Pending:
        """Vote on something of the engine's own, under an id that is never used again. See `VoteFields` for the rest.

        `deferred` does not wait for the others: the outcome comes with a later `advance`.
        """
        call = arguments.agree_of(self.info, operation, yes, deferred=deferred, **vote)
        pending = await self._ask(call, self._read_pending)
        return pending if deferred else await pending

    async def status(self) -> WorkerSnapshot:
        """What the worker shows of itself."""
        return await self._ask(local.Status(), reading.read_status)

    # --- reading answers ------------------------------------------------------------------------------------------

    def _read_lease(self, asked: Asked[Any], answer: Answer) -> Lease:
        found = expect(answer, Acquired)
        return Lease(found, self._channel.session.landings(asked, found), self, asked.number, self._limit_s)

    def _read_load(self, asked: Asked[Any], answer: Answer) -> Load:
        found = expect(answer, Loaded)
        return Load(found, self._channel.session.landings(asked, found), self._limit_s)

    def _read_pending(self, asked: Asked[Any], answer: Answer) -> Pending:
        operation, outcome, exact = reading.decided(asked, answer)
        pending = Pending(operation, outcome, self._limit_s)
        self._channel.session.pending(pending, exact=exact)
        return pending


@asynccontextmanager
async def connect(
    address: str,
    *,
    call_timeout_s: float = CALL_TIMEOUT_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    linger_s: float = LINGER_S,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    calls_open_max: int = CALLS_OPEN_MAX,
) -> AsyncIterator[CacheClient]:
    """A session with the worker at `ipc:///path`, closed when the block ends. See `ClientOptions` for the limits.

    Raises PeerUnavailable when nobody serves there, UsageError when the worker is of another release, ConfigError for
    an address or a limit that cannot be.
    """
    options = ClientOptions(
        call_timeout_s=call_timeout_s,
        connect_timeout_s=connect_timeout_s,
        linger_s=linger_s,
        message_bytes_max=message_bytes_max,
        calls_open_max=calls_open_max,
    )
    client = CacheClient(address, options)
    try:
        await client.open()
        yield client
    finally:
        await client.close()
