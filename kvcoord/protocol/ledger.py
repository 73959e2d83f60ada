"""How many pages an operation may take with no round trip: DESIGN section 4.3.

A verdict says how many pages of each pool were free on *every* rank when frame k was taken. In lockstep all ranks
have issued the same operations since, so each subtracts the same number and knows, alone but identically, what still
fits on every rank. What an agreed eviction gave back is added; what a rank freed for itself is not: that shows in a
later frame.
"""

from collections import deque
from collections.abc import Sequence

from kvcoord.errors import InvariantBroken


class Ledger:
    """Agreed capacity of a few pools, in pages. Pools are named by their position, as in frames and verdicts."""

    __slots__ = ("_capacity", "_marks", "_net", "_settled")

    def __init__(self, pool_count: int) -> None:
        self._net = [0] * pool_count
        """Pages issued minus pages credited since the beginning, per pool. Replaced, never changed: marks share it."""
        self._capacity = [0] * pool_count
        """Agreed free pages plus the net at that frame: available is this minus the net now."""
        self._settled: tuple[list[int], Sequence[int]] = self._net, self._capacity
        """What `_capacity` is the sum of: most verdicts say the same as the last one."""
        self._marks: deque[tuple[int, list[int]]] = deque()

    def begin(self, capacity: Sequence[int]) -> None:
        """Starts anew from a capacity agreed at activation."""
        self._marks.clear()
        self._net = [0] * len(self._net)
        self._capacity = list(capacity)
        self._settled = self._net, self._capacity

    def agree(self, pool: int, free: int) -> None:
        """Every rank has `free` pages in this pool now. Only before the first frame of a history."""
        self._capacity[pool] = free + self._net[pool]

    def available(self, pool: int) -> int:
        """Pages that an operation issued now may take on every rank. Never negative."""
        return max(0, self._capacity[pool] - self._net[pool])

    def issue(self, pool: int, pages: int) -> None:
        """An operation takes `pages`, covered or put to the vote: others may not count on them any more."""
        self._add(pool, pages)

    def credit(self, pool: int, pages: int) -> None:
        """An agreed eviction gave `pages` back, on every rank."""
        self._add(pool, -pages)

    def mark(self, round_number: int) -> None:
        """Frame `round_number` is taken now, with the free counts of this moment."""
        self._marks.append((round_number, self._net))

    def settle(self, round_number: int, capacity: Sequence[int]) -> None:
        """Verdict `round_number` is applied: its capacity was measured when that frame was taken."""
        marks = self._marks
        while marks and marks[0][0] < round_number:
            marks.popleft()
        if not marks or marks[0][0] != round_number:
            raise InvariantBroken("a verdict follows its frame", f"verdict {round_number}, marks {list(marks)[:3]}")
        settled = marks.popleft()[1], capacity
        if settled == self._settled:
            return
        net = settled[0]
        if len(capacity) != len(net):
            raise InvariantBroken("capacity names every pool", f"{len(capacity)} counts for {len(net)} pools")
        self._settled = settled
        self._capacity = [free + taken for free, taken in zip(capacity, net, strict=True)]

    def _add(self, pool: int, pages: int) -> None:
        net = self._net.copy()
        net[pool] += pages
        self._net = net
