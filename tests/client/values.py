"""A group, its keys and its answers, as the tests of the client use them."""

import msgspec

from kvcoord.domain import Aborted, Committed, Path, Reason
from kvcoord.protocol.local import Acquired, Opened

INFO = Opened(
    group="g",
    rank=1,
    world_size=4,
    lag=1,
    pools=["kv"],
    page_bytes=[64],
    layers=[3],
    dtypes=["bfloat16"],
    device_pages=16,
    host_pages=32,
    page_tokens=16,
    lockstep=True,
)
TWO_POOLS = Opened("g", 1, 4, 1, ["kv", "index"], [64, 8], [3, 2], ["bfloat16", "int8"], 16, 32, 16, True)
HYBRID = msgspec.structs.replace(TWO_POOLS, pools=["kv", "state"], windows=[0, 1], device_slots=[16, 4])
"""The second pool keeps one state a sequence, and has four slots."""

A, B, C = bytes([1]) * 16, bytes([2]) * 16, bytes([3]) * 16


def committed(operation: str, path: Path = Path.COVERED) -> Committed:
    return Committed(operation, path)


def aborted(operation: str, reason: Reason = Reason.HOST_FULL, rank: int = 3) -> Aborted:
    return Aborted(operation, Path.VOTED, reason, rank, {"kv": 2})


def acquired(
    lease: int,
    *,
    device_pages: int = 0,
    host_pages: int = 0,
    loaded: list[tuple[int, int]] | None = None,
    error: str = "",
) -> Acquired:
    """A granted lease of three pages."""
    operation = f"{'load-back' if loaded else 'allocate'}/{lease}/0"
    outcome = Committed(operation, Path.COVERED)
    return Acquired(outcome, lease, device_pages, host_pages, [[4, 5, 6]], loaded or [], operation, error)
