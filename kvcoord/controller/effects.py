"""What the cache logic wants done: copies, answers, notices. The worker process performs them in order."""

import msgspec

from kvcoord.domain import OperationId, Rank, Tier
from kvcoord.protocol.local import Answer


class StartCopy(msgspec.Struct, frozen=True):
    """Copy pages of every pool from one tier to the other. Slots are one list per pool. Ends with a `copy_ended`."""

    operation: OperationId
    source: Tier
    source_slots: tuple[list[int], ...]
    destination_slots: tuple[list[int], ...]


class MapHosts(msgspec.Struct, frozen=True):
    """Host memory of the ranks that hold the same bytes, as each has named its own: copies read it from now on.

    Ends with `hosts_mapped`, which may take a while. Until then no copy of this rank runs.
    """

    history: int
    named: dict[Rank, bytes]


class Reply(msgspec.Struct, frozen=True):
    """The answer to one call."""

    session: int
    call: int
    answer: Answer


CacheEffect = StartCopy | MapHosts | Reply
