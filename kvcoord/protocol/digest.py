"""The digest that shows whether two ranks have taken the same decisions: DESIGN section 4.4.

A chain of 64-bit numbers over every applied event in order, mixed with the index's own digest when it is sent. The last
events are kept with the digest after each, so that the first difference can be named afterwards.
"""

from collections import deque
from typing import Final

import xxhash

_MASK: Final = (1 << 64) - 1
_CHAIN: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xC2B2AE3D27D4EB4F
_START: Final = 1


class Digest:
    """The chain of one rank. `events_kept` bounds what `log` returns."""

    __slots__ = ("_before", "_events", "_events_kept", "_index", "_index_mixed", "applied", "chain")

    def __init__(self, events_kept: int = 4096) -> None:
        self.chain = _START
        self.applied = 0
        self._before = _START
        self._events_kept = events_kept
        self._events: deque[tuple[str, int]] = deque()
        self._index = self._index_mixed = 0
        """The index's digest of the last frame, which most frames have again, and what it comes to."""

    def apply(self, event: str) -> None:
        """Adds one event, a line of text that says all that must be equal: `commit write-through/3/0`."""
        self.chain = (self.chain * _CHAIN + xxhash.xxh3_64_intdigest(event.encode())) & _MASK
        if len(self._events) == self._events_kept:
            self._before = self._events.popleft()[1]
        self._events.append((event, self.chain))
        self.applied += 1

    def since(self, applied: int) -> list[tuple[str, int]]:
        """The events after the first `applied` ones as far as they are kept, each with the digest after it."""
        count = min(self.applied - applied, len(self._events))
        return [self._events[at] for at in range(-count, 0)]

    def combined(self, index_digest: int) -> int:
        """The number that a frame carries: the chain and the index state in one."""
        if index_digest != self._index:
            self._index, self._index_mixed = index_digest, (index_digest * _MIX) & _MASK
        return self.chain ^ self._index_mixed

    def log(self) -> list[tuple[str, int]]:
        """The last events, oldest first, each with the digest after it. The first row is only where they start."""
        return [("", self._before), *self._events]

    def begin(self) -> None:
        """Starts anew: a new history."""
        self.chain = self._before = _START
        self._events.clear()


def sides(digests: dict[int, int]) -> list[list[int]]:
    """Ranks grouped by equal digest, the largest group first, then the lowest rank. One group: no divergence."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(digests):
        groups.setdefault(digests[rank], []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def first_difference(logs: dict[int, list[tuple[str, int]]]) -> str:
    """The first event at which these ranks' logs part, with who had what.

    Empty when the logs no longer reach back to an event that all share, or do not part.
    """
    if not logs:
        return ""
    shared = set.intersection(*({digest for _, digest in log} for log in logs.values()))
    heads: dict[str, list[int]] = {}
    for rank in sorted(logs):
        log = logs[rank]
        position = max((index for index, (_, digest) in enumerate(log) if digest in shared), default=-1)
        if position < 0:
            return ""
        head = log[position + 1][0] if position + 1 < len(log) else "nothing"
        heads.setdefault(head, []).append(rank)
    if len(heads) < 2:
        return ""
    return " against ".join(f"{head} (ranks {','.join(map(str, ranks))})" for head, ranks in heads.items())
