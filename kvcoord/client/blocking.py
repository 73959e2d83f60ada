"""The blocking client: for an engine's scheduler thread. No threads and no event loop inside; one thread at a time.

Each call has a `_nowait` form that queues it and returns a ticket. Waiting for any of them sends all that is queued as
one message, so a step of the engine is one message each way. Calls are taken in the order in which they were queued.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack, overload

from kvcoord.client import arguments, reading
from kvcoord.client.arguments import DeviceSlots, VoteFields
from kvcoord.client.blocking_channel import BlockingChannel, Ticket
from kvcoord.client.options import (
    CALL_TIMEOUT_S,
    CALLS_OPEN_MAX,
    CONNECT_TIMEOUT_S,
    MESSAGE_BYTES_MAX,
    ClientOptions,
)
from kvcoord.client.progress import Landing, PendingOutcome
from kvcoord.client.registration import Pages, adopt, close_pages, create_pages, memories_of, register_of
from kvcoord.client.results import Allocation, Match, expect
from kvcoord.client.session import Asked
from kvcoord.client.waitable import BlockingLease, BlockingLoad
from kvcoord.domain import OperationId, PageKey, Tier
from kvcoord.errors import UsageError
from kvcoord.memory.pages import PageMemory
from kvcoord.memory.shared import SharedPages
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol import local
from kvcoord.protocol.local import Acquired, Advanced, Answer, Loaded, Opened, Outcome


class BlockingCacheClient:
    """One session of an engine with its sidecar; a context manager that closes it. See `kvcoord.connect_blocking`.

    Calls raise as those of `CacheClient` do. A `_nowait` form raises UsageError, or PeerUnavailable when the session is
    over already; everything else is raised by its ticket.
    """

    def __init__(self, address: str, options: ClientOptions) -> None:
        self.address = address
        self.device: list[PageMemory] = []
        """Device memory of each pool once it is registered: the engine fills and reads its pages."""
        self._own_pages: list[SharedPages] = []
        self._pages: Pages = []
        self._channel = BlockingChannel(address, options)
        try:
            self.info: Opened = self._channel.ask(local.Open(local.LOCAL_VERSION), reading.read_opened).wait()
            """The group, its geometry, and this rank's pools."""
        except BaseException:
            self._channel.close()
            raise
        self._layer_count = max(self.info.layers)
        self._ask = self._channel.ask

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send what is queued and end the session, and with it every lease. Twice is harmless."""
        self._channel.close()
        self.device = []
        close_pages(self._own_pages)

    @property
    def closed(self) -> bool:
        """Is the session over, closed by either side, as far as it was noticed?"""
        return bool(self._channel.session.lost)

    def voided(self, number: int) -> bool:
        """Has the group begun anew since this call was asked? Leases ask."""
        return self._channel.session.voided(number)

    def register(self, pages: Pages | None = None, *, model: str = "") -> None:
        """As `CacheClient.register`."""
        own = create_pages(self.info) if pages is None and not self._pages else []
        shared: Pages = own or self._pages if pages is None else pages
        try:
            adopt(shared, self._ask(register_of(shared, self.info, model), reading.read_registered).wait())
        except BaseException:
            close_pages(own)
            raise
        self._own_pages += own
        self._pages = shared
        self.device = memories_of(shared)

    # --- tickets --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is queued, and do not wait."""
        self._channel.flush()

    def flush_wait(self, tickets: Sequence[Ticket[Any]]) -> list[Any]:
        """Send what is queued, wait until each ticket is answered, and return the results in the order of `tickets`.

        Raises the error of the first that has one; the others can still be waited for.
        """
        return [ticket.wait() for ticket in tickets]

    def match_nowait(self, page_keys: Sequence[PageKey]) -> Ticket[Match]:
        return self._ask(local.Match(arguments.keys_of(page_keys)), reading.read_match)

    def acquire_nowait(self, page_keys: Sequence[PageKey], *, landed: bool = True) -> Ticket[BlockingLease]:
        call = local.Acquire(arguments.keys_of(page_keys), bool(landed))
        return self._ask(call, self._read_lease, Landing(self._layer_count))

    def release_nowait(self, lease: BlockingLease) -> Ticket[None]:
        """Nothing is queued for a lease that is not held."""
        if not lease.held:
            return self._channel.answered(local.Release(lease.number), None)
        lease.released = True
        return self._ask(local.Release(lease.number), reading.read_done)

    def write_lease_nowait(self, lease: BlockingLease, *, deferred: bool = True) -> Ticket[PendingOutcome]:
        if not lease.held:
            raise UsageError("lease", lease.number, "is not held: aborted, released, or of before the group began anew")
        return self._ask(local.WriteThrough(lease=lease.number, deferred=bool(deferred)), self._read_pending)

    def allocate_nowait(self, count: int) -> Ticket[Allocation]:
        call = local.Allocate(arguments.count_of("count", count, "allocate a number of pages that is not negative"))
        return self._ask(call, reading.read_allocation)

    def free_nowait(self, device_slots: DeviceSlots) -> Ticket[None]:
        return self._ask(local.Free(arguments.slots_of(device_slots, self.info)), reading.read_done)

    def write_through_nowait(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: bool = False,
    ) -> Ticket[PendingOutcome]:
        call = arguments.write_of(self.info, page_keys, device_slots, operation, deferred)
        return self._ask(call, self._read_pending)

    def load_back_nowait(
        self, page_keys: Sequence[PageKey], device_slots: DeviceSlots, *, operation: OperationId = ""
    ) -> Ticket[BlockingLoad]:
        call = arguments.load_of(self.info, page_keys, device_slots, operation)
        return self._ask(call, self._read_load, Landing(self._layer_count))

    def advance_nowait(self, step: int) -> Ticket[Advanced]:
        number = arguments.count_of("step", step, "number the steps from 0")
        return self._ask(local.Advance(number), reading.read_advanced)

    def evict_nowait(self, tier: Tier | str, count: int) -> Ticket[int]:
        number = arguments.count_of("count", count, "evict a number of pages that is not negative")
        return self._ask(local.Evict(arguments.tier_of(tier), number), reading.read_evicted)

    def agree_nowait(
        self, operation: OperationId, yes: bool, *, deferred: bool = False, **vote: Unpack[VoteFields]
    ) -> Ticket[PendingOutcome]:
        call = arguments.agree_of(self.info, operation, yes, deferred=deferred, **vote)
        return self._ask(call, self._read_pending)

    def status_nowait(self) -> Ticket[WorkerSnapshot]:
        return self._ask(local.Status(), reading.read_status)

    # --- the same, waiting ----------------------------------------------------------------------------------------

    def match(self, page_keys: Sequence[PageKey]) -> Match:
        """As `CacheClient.match`."""
        return self.match_nowait(page_keys).wait()

    def acquire(self, page_keys: Sequence[PageKey], *, landed: bool = True) -> BlockingLease:
        """As `CacheClient.acquire`."""
        return self.acquire_nowait(page_keys, landed=landed).wait()

    def release(self, lease: BlockingLease) -> None:
        """As `lease.release`."""
        self.release_nowait(lease).wait()

    def write_lease(self, lease: BlockingLease, *, deferred: bool = True) -> PendingOutcome:
        """Publish the pages that the engine computed under this lease, and copy them to the host.

        The outcome is known at once when the write was covered. It comes with a later `advance` when it was put to the
        vote (`deferred` False: waits for that), and while the path's loads have not ended on all ranks.
        """
        return self.write_lease_nowait(lease, deferred=deferred).wait()

    def allocate(self, count: int) -> Allocation:
        """As `CacheClient.allocate`."""
        return self.allocate_nowait(count).wait()

    def free(self, device_slots: DeviceSlots) -> None:
        """As `CacheClient.free`."""
        self.free_nowait(device_slots).wait()

    @overload
    def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: Literal[False] = False,
    ) -> Outcome: ...

    @overload
    def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: Literal[True],
    ) -> PendingOutcome: ...

    def write_through(
        self,
        page_keys: Sequence[PageKey],
        device_slots: DeviceSlots,
        *,
        operation: OperationId = "",
        deferred: bool = False,
    ) -> Outcome | PendingOutcome:
        """As `CacheClient.write_through`.

        Raises UsageError when it is not deferred and the group's steps cannot wait for a vote: nothing could resolve
        it here but a later `advance` of this thread.
        """
        ticket = self.write_through_nowait(page_keys, device_slots, operation=operation, deferred=deferred)
        return ticket.wait() if deferred else ticket.wait().result()

    def load_back(
        self, page_keys: Sequence[PageKey], device_slots: DeviceSlots, *, operation: OperationId = ""
    ) -> BlockingLoad:
        """As `CacheClient.load_back`."""
        return self.load_back_nowait(page_keys, device_slots, operation=operation).wait()

    def advance(self, step: int) -> Advanced:
        """As `CacheClient.advance`."""
        return self.advance_nowait(step).wait()

    def evict(self, tier: Tier | str, count: int) -> int:
        """As `CacheClient.evict`."""
        return self.evict_nowait(tier, count).wait()

    @overload
    def agree(
        self, operation: OperationId, yes: bool, *, deferred: Literal[False] = False, **vote: Unpack[VoteFields]
    ) -> Outcome: ...

    @overload
    def agree(
        self, operation: OperationId, yes: bool, *, deferred: Literal[True], **vote: Unpack[VoteFields]
    ) -> PendingOutcome: ...

    def agree(
        self, operation: OperationId, yes: bool, *, deferred: bool = False, **vote: Unpack[VoteFields]
    ) -> Outcome | PendingOutcome:
        """As `CacheClient.agree`; raises UsageError as `write_through` does."""
        ticket = self.agree_nowait(operation, yes, deferred=deferred, **vote)
        return ticket.wait() if deferred else ticket.wait().result()

    def status(self) -> WorkerSnapshot:
        """As `CacheClient.status`."""
        return self.status_nowait().wait()

    # --- reading answers ------------------------------------------------------------------------------------------

    def _read_lease(self, asked: Asked[Any], answer: Answer) -> BlockingLease:
        found = expect(answer, Acquired)
        return BlockingLease(found, self._channel.session.landings(asked, found), self, asked.number, self._channel)

    def _read_load(self, asked: Asked[Any], answer: Answer) -> BlockingLoad:
        found = expect(answer, Loaded)
        return BlockingLoad(found, self._channel.session.landings(asked, found), self._channel)

    def _read_pending(self, asked: Asked[Any], answer: Answer) -> PendingOutcome:
        operation, outcome, exact = reading.decided(asked, answer)
        pending = PendingOutcome(operation, outcome)
        self._channel.session.pending(pending, exact=exact)
        return pending


def connect_blocking(
    address: str,
    *,
    call_timeout_s: float = CALL_TIMEOUT_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    calls_open_max: int = CALLS_OPEN_MAX,
) -> BlockingCacheClient:
    """A session with the worker at `ipc:///path`; a context manager that closes it. Raises as `connect` does."""
    options = ClientOptions(
        call_timeout_s=call_timeout_s,
        connect_timeout_s=connect_timeout_s,
        message_bytes_max=message_bytes_max,
        calls_open_max=calls_open_max,
    )
    return BlockingCacheClient(address, options)
