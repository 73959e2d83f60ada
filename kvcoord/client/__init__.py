"""What an engine imports: an async client (`connect`) and a blocking one for a scheduler thread (`connect_blocking`).

`session` holds all that is alike, and is pure: calls numbered and packed, answers matched in any order. `arguments`
checks what comes from a user, `reading` and `results` make of an answer what a user sees, `progress` follows what goes
on after an answer. `channel` and `blocking_channel` only move bytes; `cache` and `blocking` are the two faces.
"""

from kvcoord.client.awaitable import Lease, Load, Pending
from kvcoord.client.blocking import BlockingCacheClient, connect_blocking
from kvcoord.client.blocking_channel import Ticket
from kvcoord.client.cache import CacheClient, connect
from kvcoord.client.progress import PendingOutcome
from kvcoord.client.results import Allocation, Match
from kvcoord.client.waitable import BlockingLease, BlockingLoad

__all__ = [
    "Allocation",
    "BlockingCacheClient",
    "BlockingLease",
    "BlockingLoad",
    "CacheClient",
    "Lease",
    "Load",
    "Match",
    "Pending",
    "PendingOutcome",
    "Ticket",
    "connect",
    "connect_blocking",
]
