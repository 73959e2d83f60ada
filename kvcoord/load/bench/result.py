"""What a benchmark returns: rows for tables and JSON, charts for the report, and the words beside them.

Times are microseconds. Latencies are compared by their quantiles, and a ratio is ours over the peer's: below one is
faster. Knows nothing of what was measured.
"""

from collections.abc import Sequence
from math import ceil

import msgspec


class Series(msgspec.Struct, frozen=True):
    """One subject's times in one case, in the order in which they were measured. Never empty."""

    subject: str
    micros: list[float]

    def quantile(self, share: float) -> float:
        """The smallest time that at least this share of all does not exceed."""
        ordered = sorted(self.micros)
        return ordered[max(ceil(share * len(ordered)) - 1, 0)]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits; None: no such limit."""

    ratio_p50_max: float | None = None
    ratio_p99_max: float | None = None
    p50_us_max: float | None = None

    def __str__(self) -> str:
        limits = (
            ("p50", self.ratio_p50_max, "of peer"),
            ("p99", self.ratio_p99_max, "of peer"),
            ("p50", self.p50_us_max, "us"),
        )
        return ", ".join(f"{name} <= {limit:.3g} {of}" for name, limit, of in limits if limit is not None)


class LatencyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case against one peer. `budget` is empty and `met` None where none was set."""

    case: str
    ranks: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    peer: str
    peer_p50_us: float
    peer_p90_us: float
    peer_p99_us: float
    peer_max_us: float
    ratio_p50: float
    ratio_p99: float
    budget: str
    met: bool | None


class Line(msgspec.Struct, frozen=True):
    """A labelled line of a chart. `dots`: points without a line between them."""

    label: str
    points: list[tuple[float, float]]
    dots: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One plot. Logarithmic axes leave out what is not above zero."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    x_log: bool = False
    y_log: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's outcome. `rows` are structs of one type; `notes` say what a reader must know, in sentences."""

    name: str
    title: str
    rows: Sequence[msgspec.Struct]
    charts: list[Chart] = []
    notes: list[str] = []


def compare(case: str, ranks: int, ours: Series, peer: Series, budget: Budget | None = None) -> LatencyRow:
    """The row of one case against one peer."""
    quantiles = [(ours.quantile(share), peer.quantile(share)) for share in (0.5, 0.9, 0.99, 1.0)]
    (p50, peer_p50), (p90, peer_p90), (p99, peer_p99), (most, peer_most) = quantiles
    ratio_p50, ratio_p99 = p50 / peer_p50, p99 / peer_p99
    met = None
    if budget is not None:
        checks = (
            (ratio_p50, budget.ratio_p50_max),
            (ratio_p99, budget.ratio_p99_max),
            (p50, budget.p50_us_max),
        )
        met = all(value <= limit for value, limit in checks if limit is not None)
    return LatencyRow(
        case=case,
        ranks=ranks,
        p50_us=p50,
        p90_us=p90,
        p99_us=p99,
        max_us=most,
        peer=peer.subject,
        peer_p50_us=peer_p50,
        peer_p90_us=peer_p90,
        peer_p99_us=peer_p99,
        peer_max_us=peer_most,
        ratio_p50=ratio_p50,
        ratio_p99=ratio_p99,
        budget="" if budget is None else str(budget),
        met=met,
    )


def distribution(series: Series) -> Line:
    """The share of times up to each time, for a chart of distributions. At most some hundred points."""
    ordered = sorted(series.micros)
    step = max(len(ordered) // 200, 1)
    ranks = [*range(0, len(ordered), step), len(ordered) - 1]
    return Line(series.subject, [(ordered[rank], (rank + 1) / len(ordered)) for rank in ranks])


def over_time(series: Series, points_max: int = 400) -> Line:
    """The first times in the order in which they were measured."""
    points = [(float(number), micros) for number, micros in enumerate(series.micros[:points_max])]
    return Line(series.subject, points, dots=True)
