"""How long something took, counted by classes of time. Pure: who has the two moments subtracts them."""

from bisect import bisect_left


class Durations:
    """`counts[i]` were <= `bounds_s[i]` and above the bound before; the last count has no upper bound.

    One search and two additions a value. Used from one thread.
    """

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s
