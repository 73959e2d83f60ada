"""The charts of a load over time: rates, latencies, lateness, and what each process used."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from kvcoord.load.bench.host import Usage
from kvcoord.load.bench.players import Heard
from kvcoord.load.bench.result import Chart, Line, Series

SECONDS = "seconds since the first step"

QUANTILES = (("median", 0.5), ("99th percentile", 0.99), ("slowest", 1.0))

Usages = Sequence[tuple[float, Mapping[str, Usage]]]
"""When, and what each process used then."""


def rate_chart(arriving_s: Sequence[float], heard: Sequence[Heard]) -> Chart:
    """Requests that arrived and that were served, between one word of rank 0 and the next."""
    offered: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    arrived = 0
    last_s = 0.0
    for word in heard:
        until = bisect_right(arriving_s, word.at_s)
        span_s = max(word.at_s - last_s, 1e-3)
        offered.append((word.at_s, (until - arrived) / span_s))
        served.append((word.at_s, len(word.said.latency_ms) / span_s))
        arrived, last_s = until, word.at_s
    lines = [Line("offered (arrived)", offered), Line("served on rank 0", served)]
    return Chart(title="Requests a second", x_label=SECONDS, y_label="requests/s", lines=lines)


def latency_charts(heard: Sequence[Sequence[Heard]]) -> list[Chart]:
    """Of rank 0's requests of each second; and how late each engine was."""
    series = [(word.at_s, Series("", word.said.latency_ms)) for word in heard[0] if word.said.latency_ms]
    by_quantile = [Line(name, [(at_s, each.quantile(share)) for at_s, each in series]) for name, share in QUANTILES]
    behind = [
        Line(f"engine {rank}", [(word.at_s, word.said.behind_s * 1000) for word in words])
        for rank, words in enumerate(heard)
    ]
    return [
        Chart(
            title="From a request's arrival to its pages being held, requests of each second, rank 0",
            x_label=SECONDS,
            y_label="milliseconds",
            lines=by_quantile,
            y_log=True,
        ),
        Chart(
            title="How late the engines' steps began: a line that climbs is a group that does not keep up",
            x_label=SECONDS,
            y_label="milliseconds late",
            lines=behind,
        ),
    ]


def usage_charts(usages: Usages) -> list[Chart]:
    """Memory, descriptors and processor time of every process."""
    return [
        _usage_chart("Resident memory of each process", "MB", usages, lambda use: use.resident_bytes / 1e6),
        _usage_chart(
            "Open file descriptors of each process", "descriptors", usages, lambda use: float(use.descriptors)
        ),
        Chart(
            title="Processor time of each process, as a share of one core",
            x_label=SECONDS,
            y_label="share of a core",
            lines=[Line(name, _shares(name, usages)) for name in usages[0][1]],
        ),
    ]


def busy_chart(busy: Sequence[tuple[float, Mapping[str, Usage], float]]) -> Chart:
    """What these processes took of the machine, and what everything on it took together."""
    ours, all_of_it = [], []
    for (before_s, before, machine_before), (at_s, now, machine_now) in pairwise(busy):
        span_s = max(at_s - before_s, 1e-3)
        ours.append((at_s, sum(now[name].cpu_s - before[name].cpu_s for name in now) / span_s))
        all_of_it.append((at_s, (machine_now - machine_before) / span_s))
    return Chart(
        title="Cores at work: for these processes, and for everything on the machine",
        x_label=SECONDS,
        y_label="cores",
        lines=[Line("these processes", ours), Line("the whole machine", all_of_it)],
    )


def _usage_chart(title: str, unit: str, usages: Usages, read: Callable[[Usage], float]) -> Chart:
    lines = [Line(name, [(at_s, read(by_name[name])) for at_s, by_name in usages]) for name in usages[0][1]]
    return Chart(title=title, x_label=SECONDS, y_label=unit, lines=lines)


def _shares(name: str, usages: Usages) -> list[tuple[float, float]]:
    """Between one reading and the next."""
    points = []
    for (before_s, before), (at_s, now) in pairwise(usages):
        points.append((at_s, (now[name].cpu_s - before[name].cpu_s) / max(at_s - before_s, 1e-3)))
    return points
