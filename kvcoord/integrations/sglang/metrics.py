"""The metrics of one rank inside SGLang, on a loopback HTTP port of its own: `/metrics`, `/healthz`, `/readyz`.

Off unless `http` is configured. A scrape reads plain numbers from another thread; the scheduler's does nothing for it.
What a rank decides is equal on all ranks: take `max by (group)`, never `sum`.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcoord.config.address import split_host_port
from kvcoord.integrations.sglang.capacity import Capacity
from kvcoord.integrations.sglang.counters import Counters
from kvcoord.observability.http import HttpServer
from kvcoord.observability.http_routes import METRICS, Response, Route, text

_PREFIX: Final = "kvcoord_sglang_"
_WORKING: Final = "active"

Values = Mapping[tuple[str, ...], float]
"""Samples of one family by the labels that it has beside group and rank."""
_CLOSE_LIMIT_S: Final = 5.0


class RankMetrics(Collector):
    """The series of one rank. `state` says how its group stands, `open_count` how many operations are not over."""

    def __init__(
        self,
        group: str,
        rank: int,
        counters: Counters,
        capacity: Capacity,
        state: Callable[[], str],
        open_count: Callable[[], int],
    ) -> None:
        self._scope = (group, str(rank))
        self._counters = counters
        self._capacity = capacity
        self._state = state
        self._open_count = open_count
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def routes(self) -> Mapping[str, Route]:
        """What the HTTP port answers."""
        return {
            "/healthz": lambda: text("ok"),
            "/readyz": self._ready,
            "/metrics": lambda: Response(generate_latest(self._registry), METRICS),
        }

    def _ready(self) -> Response:
        state = self._state()
        return text("ready") if state == _WORKING else text(f"not ready: {state}", HTTPStatus.SERVICE_UNAVAILABLE)

    def collect(self) -> Iterable[Metric]:
        counters = self._counters
        yield self._gauge("membership_state", "1 for the state that holds.", {(self._state(),): 1}, "state")
        yield self._counter("steps_total", "Scheduler steps.", {(): counters.steps})
        yield self._counter("verdict_waits_total", "Steps whose verdict was late.", {(): counters.verdict_waits})
        yield self._counter("verdict_wait_seconds_total", "Waited for late verdicts.", {(): counters.verdict_wait_s})
        decisions: Values = {
            (what, path.value, outcome.value, "" if reason is None else reason.value): count
            for (what, path, outcome, reason), count in sorted(dict(counters.decisions).items(), key=str)
        }
        labels = ("operation", "path", "outcome", "reason")
        yield self._counter("decisions_total", "Operations decided; no reason at a commit.", decisions, *labels)
        yield self._gauge("operations_open", "Writes and loads that are not over.", {(): self._open_count()})
        pools = self._capacity.pools
        free = dict(zip(pools, self._capacity.now(), strict=True))
        agreed = dict(zip(pools, self._capacity.agreed(), strict=True))
        own: Values = {(pool,): slots for pool, slots in free.items()}
        yield self._gauge("free_slots", "Token slots free on this rank.", own, "pool")
        held: Values = {(pool,): max(0, slots - agreed[pool]) for pool, slots in free.items()}
        told = (
            "Token slots free on this rank that are not handed out: the poorest rank lacks them, or they are promised."
        )
        yield self._gauge("held_back_slots", told, held, "pool")

    def _gauge(self, name: str, told: str, values: Values, *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(_PREFIX + name, told, labels=("group", "rank", *labels))
        for own, value in values.items():
            family.add_metric((*self._scope, *own), value)
        return family

    def _counter(self, name: str, told: str, values: Values, *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(_PREFIX + name, told, labels=("group", "rank", *labels))
        for own, value in values.items():
            family.add_metric((*self._scope, *own), value)
        return family


class Port:
    """Serves routes at a loopback address on a thread of its own. Opened once, closed once."""

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        host, port = split_host_port("http", address)
        self._server = HttpServer(host, port, routes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvcoord-http", daemon=True)

    @property
    def address(self) -> str:
        return self._server.address

    def open(self) -> None:
        """Raises ConfigError when the address cannot be listened on."""
        self._loop.run_until_complete(self._server.open())
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Harmless when repeated."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(_CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)
        self._loop.close()
