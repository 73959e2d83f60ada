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
    LINGER_S,
    MESSAGE_BYTES_MAX,
    ClientOptions,
)
from kvcoord.client.progress import Landing, PendingOutcome
from kvcoord.client.registration import close_pages, create_pages, register_of
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
