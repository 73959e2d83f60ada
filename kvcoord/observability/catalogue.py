"""Every metric that kvcoord exports, declared once: name, kind, help, labels.

Cardinality. No label value comes from a request, a page or an operation id. `group` and `rank` are bounded by the
configured limits and exist only while the group does; `operation` (the kind), `path`, `outcome`, `reason` and `tier`
are the enums of `domain`; `pool`, `direction`, `cause`, `message` and `state` are fixed by configuration or program.
A group costs some 40 series and 3 for each rank, a worker some 100. A coordinator shows its first `RANKS_SHOWN_MAX`
ranks and says how many it left out: a scrape holds up its event loop, by some 5 microseconds for each series.

What a worker counts is equal on all ranks of a group where the ranks agree (decisions, pages hit, pages evicted):
take `max by (group)`, never `sum`. The coordinator counts each decision of a group once.
"""

from enum import StrEnum
from typing import Final, NamedTuple

RANKS_SHOWN_MAX: Final = 2048


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Family(NamedTuple):
    """One metric with all its label combinations. `name` is complete, with prefix and unit."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


class Declarations:
    """Declares families that share a prefix, and keeps them in the order of declaration."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.families: list[Family] = []

    def counter(self, name: str, help: str, *labels: str) -> Family:
        return self._declare(name, Kind.COUNTER, help, labels)

    def gauge(self, name: str, help: str, *labels: str) -> Family:
        return self._declare(name, Kind.GAUGE, help, labels)

    def histogram(self, name: str, help: str, *labels: str) -> Family:
        return self._declare(name, Kind.HISTOGRAM, help, labels)

    def _declare(self, name: str, kind: Kind, help: str, labels: tuple[str, ...]) -> Family:
        family = Family(self._prefix + name, kind, help, labels)
        self.families.append(family)
        return family


class ProcessFamilies:
    """What both processes export, as `kvcoord_<process>_...`. `scope` are the labels of what belongs to a group."""

    def __init__(self, process: str, *scope: str) -> None:
        self.declared = declare = Declarations(f"kvcoord_{process}_")
        self.info = declare.gauge("info", "Always 1; says what runs.", "version", "incarnation")
        self.uptime = declare.gauge("uptime_seconds", "Age of this process.")
        self.ready = declare.gauge("ready", "1 when it can serve, else 0; /readyz has the reason.")
        self.received = declare.counter("messages_received_total", "Messages from peers, by name.", "message")
        self.ignored = declare.counter("messages_ignored_total", "Messages without effect, by cause.", "cause")
        self.events = declare.counter("recorder_events_total", "Events the flight recorder took.")
        self.events_dropped = declare.counter("recorder_events_dropped_total", "Events it overwrote.")
        self.invalid = declare.counter("samples_invalid_total", "Impossible values withheld: a defect.", "metric")
        self.state = declare.gauge(
            "membership_state", "1 for the state that holds; others are absent.", *scope, "state"
        )
        self.epoch = declare.gauge("epoch", "Number of the current membership.", *scope)
        self.round = declare.gauge("round", "Last round that closed.", *scope)
        self.operations_open = declare.gauge("operations_open", "Operations begun and not ended.", *scope)
        self.decisions = declare.counter(
            "decisions_total",
            "Operations decided; no reason at a commit.",
            *scope,
            "operation",
            "path",
            "outcome",
            "reason",
        )
        self.retractions = declare.counter("retractions_total", "Commits taken back.", *scope, "reason")
        self.divergences = declare.counter("divergences_total", "Rounds with unequal digests.", *scope)


class CoordinatorFamilies(ProcessFamilies):
    """What a coordinator exports: one truth for each group, whichever of its ranks reported it."""

    def __init__(self) -> None:
        super().__init__("coordinator", "group")
        declare, rank = self.declared, ("group", "rank")
        self.world_size = declare.gauge("world_size", "Ranks that the group must have.", "group")
        self.group_ready = declare.gauge("group_ready", "1 when all ranks are active in one epoch, else 0.", "group")
        self.rounds = declare.counter("rounds_closed_total", "Rounds closed by this coordinator.", "group")
        self.round_close = declare.histogram("round_close_seconds", "First frame of a round to its verdict.", "group")
        self.free = declare.gauge("free_pages", "Pages free on every rank, by the last verdict.", "group", "pool")
        self.ranks_lost = declare.counter("ranks_lost_total", "Times that a rank went missing.", "group")
        self.joins_refused = declare.counter("joins_refused_total", "Ranks turned away at join.", "reason")
        self.rank_heard = declare.gauge("rank_last_heard_seconds", "Age of the rank's last message.", *rank)
        self.rank_round = declare.gauge("rank_round", "Last round that the rank sent a frame for.", *rank)
        self.rank_state = declare.gauge("rank_state", "1 for the state that holds; others are absent.", *rank, "state")
        self.ranks_hidden = declare.gauge("ranks_hidden", "Ranks left out of this page; /status has them.")


class WorkerFamilies(ProcessFamilies):
    """What the process of one rank exports."""

    def __init__(self) -> None:
        super().__init__("worker", "group", "rank")
        declare, rank = self.declared, ("group", "rank")
        tier, pool, way = (*rank, "tier"), (*rank, "pool", "tier"), (*rank, "direction")
        self.heard = declare.gauge("coordinator_last_heard_seconds", "Age of the coordinator's last message.", *rank)
        self.heartbeats = declare.counter("heartbeats_sent_total", "Heartbeats sent.", *rank)
        self.pool_capacity = declare.gauge("pool_capacity_pages", "Pages of the pool.", *pool)
        self.pool = declare.gauge("pool_pages", "Pages free, reserved, used or quarantined.", *pool, "state")
        self.cached = declare.gauge("cached_pages", "Pages that lookups can see.", *tier)
        self.requested = declare.counter("pages_requested_total", "Pages looked up.", *rank)
        self.hit = declare.counter("pages_hit_total", "Pages found, by the tier they were on.", *tier)
        self.evicted = declare.counter("pages_evicted_total", "Pages evicted from the tier.", *tier)
        self.copies = declare.counter("copies_total", "Copies that landed.", *way)
        self.copies_failed = declare.counter("copies_failed_total", "Copies that failed.", *way)
        self.copied_pages = declare.counter("copied_pages_total", "Pages that landed.", *way)
        self.copied_bytes = declare.counter("copied_bytes_total", "Bytes that landed.", *way)
        self.copy = declare.histogram("copy_seconds", "Start to end of one copy.", *way)
        self.step = declare.histogram("step_seconds", "Time that one step cost the engine's thread.", *rank)
