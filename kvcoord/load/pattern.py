"""The bytes that a page must hold, derived from whose page it is, so that any copy can be verified anywhere.

Two pages that differ in key, layer, rank or pool have different bytes. Knows nothing of pools or copies.
"""

import struct
from hashlib import blake2b
from typing import Final

from kvcoord.domain import PageKey, PoolName, Rank
from kvcoord.errors import UsageError

PERIOD_BYTES: Final = 61
"""A prime: a copy that lands at a wrong offset (a power of two, as a rule) is seen, as no such shift is a multiple."""

_PLACE: Final = struct.Struct("<II")
_PERSON: Final = b"kvcoord.pattern"


def page_bytes(key: PageKey, layer: int, rank: Rank, pool: PoolName, size: int) -> bytes:
    """The `size` bytes of one page in one layer: a hash of its identity, repeated. A shorter one is a prefix.

    `layer` and `rank` are below 2**32.
    """
    if size < 0:
        raise UsageError("size", size, "give a number of bytes >= 0")
    identity = key + _PLACE.pack(layer, rank) + pool.encode()
    period = blake2b(identity, digest_size=PERIOD_BYTES, person=_PERSON).digest()
    return (period * (size // PERIOD_BYTES + 1))[:size]


def verify(view: bytes | bytearray | memoryview, key: PageKey, layer: int, rank: Rank, pool: PoolName) -> bool:
    """Whether `view` (any shape, C-contiguous) holds exactly the bytes of that page."""
    # Comparing a memoryview unpacks it item by item; bytes are compared by one memcmp.
    found = bytes(view)
    return found == page_bytes(key, layer, rank, pool, len(found))
