"""Messages between an engine and its sidecar, over a local socket. Structs, no behaviour.

An engine sends calls, each with a number of its own; all calls of one moment travel in one `Calls`. The worker answers
each call once, in any order; all answers of one moment travel in one `Answers`. Page keys travel as one string of
bytes, 16 for each page, root first. Slots are one list per pool, in the group's pool order.
"""

from typing import Final

import msgspec

from kvcoord.domain import (
    PAGE_KEY_BYTES,
    Aborted,
    Agreement,
    Committed,
    OperationId,
    PageKey,
    Rank,
    Reason,
    Tier,
)
from kvcoord.errors import KvcoordError

LOCAL_VERSION: Final = 1

Slots = list[list[int]]
"""One list of slots for each pool of the group."""

NO_SLOT: Final = -1
"""Stands for the slot of a page that has none in a pool that keeps only the end of a sequence."""

Outcome = Committed | Aborted


class Memory(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where the bytes of one device pool are: a memfd of a process of this host. See `memory.shared`."""

    pool: str
    pid: int
    fd: int
    inode: int
    size_bytes: int


class DevicePool(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where the pages of one pool are in a GPU's memory. See `memory.device`."""

    pool: str
    allocations: list[bytes]
    planes: list[tuple[int, int]]
    slot_stride: int


class DeviceMemory(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The pages of all pools on one GPU, and the event that the engine records before it asks for copies."""

    device: str
    pools: list[DevicePool]
    computed: bytes


class Open(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=1):
    """First call of a session. Answered with Opened; whoever only looks on calls nothing but Match and Status."""

    version: int


class Match(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=2):
    """What of this path is cached? Changes nothing."""

    keys: bytes


class Acquire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=3):
    """Hold this path on the device: keep what is there, load back what is on the host, slots for the rest.

    Answered when the outcome is known, and with `landed` also this rank's copy is over.
    """

    keys: bytes
    landed: bool = True


class Release(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=4):
    """The engine no longer reads the pages of this lease. Slots it never published are freed."""

    lease: int


class Allocate(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=5):
    """Device slots that belong to no page yet."""

    count: int


class Free(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=6):
    """Slots from Allocate that were not used."""

    slots: Slots


class WriteThrough(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=7):
    """The engine has computed pages: publish them on the device, and copy them to the host as the policy says.

    With `lease`: the pages that the lease had to compute. Else the last pages of `keys`, in `slots`. An engine without
    lockstep keeps its slots and names the `operation`. With `deferred` the answer does not wait for a vote.
    """

    keys: bytes = b""
    slots: Slots = []
    lease: int = 0
    operation: OperationId = ""
    deferred: bool = False


class LoadBack(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=8):
    """Copy the pages of this path that are on the host, and not on the device, into `slots` of the engine."""

    keys: bytes
    slots: Slots
    operation: OperationId = ""
    landed: bool = False


class Advance(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=9):
    """The engine begins step `step`: applies the verdict that is due and sends this step's frame."""

    step: int


class Agree(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=10):
    """A vote about something of the engine's own. Answered with the decision; `deferred`: in a later Advanced."""

    operation: OperationId
    yes: bool
    agreement: Agreement = Agreement.ALL
    participants: int = 0
    value: int | list[bytes] | None = None
    reason: Reason | None = None
    shortfall: dict[str, int] = {}
    deferred: bool = False


class Status(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=11):
    """The worker's status."""


class Evict(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=12):
    """Take pages off a tier on all ranks: the same pages everywhere, or none."""

    tier: Tier
    count: int


class Register(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=13):
    """This session is the rank's engine: here are its device pools, in the group's pool order. One engine at a time.

    Pools without layers on this rank are left out. With `device` in place of `memory` the pages are on a GPU, and the
    answer is Registered instead of Done. `model` names what computes the pages: host pages outlive an engine for the
    next one of the same model; empty: they do not.
    """

    memory: list[Memory]
    model: str = ""
    device: DeviceMemory | None = None


Call = (
    Open
    | Register
    | Match
    | Acquire
    | Release
    | Allocate
    | Free
    | WriteThrough
    | LoadBack
    | Advance
    | Agree
    | Status
    | Evict
)


class Calls(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=60):
    """What an engine asks at one moment, in order: (number, call)."""

    calls: list[tuple[int, Call]]


class Opened(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=31):
    """The session is open. `layers` are those of this rank, 0 for a pool without any; no `parts`: one in each pool.

    `windows` are the pages at the end of a sequence that have a slot in a pool, 0 for all; without them every page has
    one in each pool. `device_slots` are those of each pool, `device_pages` where they are left out.
    """

    group: str
    rank: Rank
    world_size: int
    lag: int
    pools: list[str]
    page_bytes: list[int]
    layers: list[int]
    dtypes: list[str]
    device_pages: int
    host_pages: int
    page_tokens: int
    lockstep: bool
    parts: list[int] = []
    windows: list[int] = []
    device_slots: list[int] = []


class Matched(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=32):
    """Leading pages of the path that are cached; a page on both tiers counts as device."""

    device_pages: int
    host_pages: int


class Acquired(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=33):
    """`slots` for every page of the path when committed. `loaded`: (first, count) runs that this lease loads.

    `operation` names the load-back. `error`: this rank's copy of it, or of one it shares, failed; the group will
    retract it. Aborted: nothing is held (`lease` 0), and the counts say what was cached. In a pool that keeps only
    ends, NO_SLOT stands for pages other than the last cached ones and the last ones of the path.
    """

    outcome: Outcome
    lease: int
    device_pages: int
    host_pages: int
    slots: Slots
    loaded: list[tuple[int, int]]
    operation: OperationId = ""
    error: str = ""


class Done(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=34):
    """Nothing to say but that it is done."""


class Allocated(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=35):
    outcome: Outcome
    slots: Slots


class Written(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=36):
    """`outcome` None: put to the vote, told in a later Advanced. `pages` are being copied, 0 when none had to be."""

    outcome: Outcome | None
    operation: OperationId
    pages: int


class Loaded(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=37):
    """`pages` were or are being copied into the first slots; `operation` names the transfer.

    `error`: this rank's copy was waited for and failed; the group will retract it.
    """

    outcome: Outcome
    operation: OperationId
    pages: int
    error: str = ""


class Advanced(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=38):
    """The verdict applied (-1: none was due): outcomes of deferred operations, and transfers that ended.

    `completed` landed on all ranks; `retracted` failed somewhere, with (operation, reason, rank). `operations_open`
    counts operations not ended, the same on every rank. `broken` are leases with pages of a retracted load-back: what
    is computed from them is void.
    """

    step: int
    round: int
    outcomes: list[Outcome]
    completed: list[OperationId]
    retracted: list[tuple[OperationId, Reason, Rank]]
    operations_open: int
    broken: list[int] = []


class Agreed(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=39):
    """`outcome` None: told in a later Advanced."""

    outcome: Outcome | None


class StatusBody(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=40):
    """A WorkerSnapshot as JSON."""

    body: bytes


class Evicted(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=41):
    pages: int


class Registered(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=43):
    """The events that a GPU's copies record: after each write, and after each layer of a load-back."""

    written: bytes
    layers: list[bytes]


class Failed(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=42):
    """The call raises on the engine's side: `error` names a class of `kvcoord.errors`, `fields` are its arguments."""

    error: str
    fields: list[str | int | float | list[list[int]]]


Answer = (
    Opened
    | Matched
    | Acquired
    | Done
    | Allocated
    | Written
    | Loaded
    | Advanced
    | Agreed
    | StatusBody
    | Evicted
    | Registered
    | Failed
)


class Answers(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=61):
    """Answers that became known at one moment: (number of the call, answer)."""

    answers: list[tuple[int, Answer]]


class Landed(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=62):
    """Progress of a transfer of this rank: layers that have landed. `error`: it failed, with the cause."""

    operation: OperationId
    layers: int
    error: str = ""


FromEngine = Calls
FromWorker = Answers | Landed


def join_keys(keys: list[PageKey]) -> bytes:
    """Page keys as they travel."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[PageKey]:
    """The page keys of one message. The length was checked to be a multiple of a key's."""
    return [joined[at : at + PAGE_KEY_BYTES] for at in range(0, len(joined), PAGE_KEY_BYTES)]


def failed(error: KvcoordError) -> Failed:
    """An exception as it travels to the engine: the class by name, its arguments as text or numbers."""
    fields = [field if isinstance(field, str | int | float) else str(field) for field in error.args]
    return Failed(type(error).__name__, list(fields))
