"""What a replay has shown: the engines' tallies and the workers' counters of all ranks, as one group.

Requests, pages, hits and decisions are the group's: every rank must count the same, and where one does not the replay
has failed. Bytes, leaks, corrupt pages and times are added up over the ranks.
"""

from collections.abc import Iterator, Sequence

import msgspec

from kvcoord.domain import Aborted, Outcome, Path, Tier
from kvcoord.load.dialogue import DriverReport
from kvcoord.load.plan import Agreeing, ReplayPlan
from kvcoord.observability.snapshot import DivergenceSnapshot, PoolSnapshot, WorkerSnapshot
from kvcoord.runtime.exits import Exit


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one pool that nobody could use again after everything had ended. `stray`: used, but not cached."""

    rank: int
    tier: Tier
    pool: str
    reserved: int
    quarantined: int
    stray: int

    @property
    def pages(self) -> int:
        return self.reserved + self.quarantined + abs(self.stray)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay: what `--json` prints.

    `pages_hit_by_tier` counts pages that a request found cached, `aborts` operations by reason, `aborts_first` the
    first abort for each reason. `host_pages_here` are the cached pages in each rank's own host memory, `pages_to_host`
    those that it copied there. `step_us_*` is engine-thread time of one step with a request: one message to the
    worker and one back, without verifying and filling. `advance_share` is the part of it until `advance` was answered.
    """

    trace: str
    agreement: Agreeing
    ranks: int
    tp: int
    pp: int
    lag: int
    settled: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    requests: int
    skipped: int
    retries: int
    repeats: int
    steps: int
    pages_total: int
    pages_hit: int
    pages_hit_by_tier: dict[str, int]
    pages_loaded: int
    pages_evicted: dict[str, int]
    pages_verified: int
    pages_corrupt: int
    pages_leaked: int
    leaks: list[Leak]
    loads_failed: int
    commits: int
    aborts: dict[str, int]
    aborts_first: dict[str, Aborted]
    retractions: dict[str, int]
    host_pages_here: list[int]
    pages_to_host: list[int]
    covered: int
    voted: int
    immediate: int
    bytes_moved: int
    bytes_moved_per_s: float
    step_us_p50: float
    step_us_p99: float
    step_us_max: float
    advance_share: float
    digests_equal: bool
    differences: list[str]
    divergence: DivergenceSnapshot | None
    coordinators_lost: int
    seconds: float

    @property
    def exit_code(self) -> Exit:
        """OK only if the ranks are equal, nothing leaked and no page was wrong."""
        if not self.digests_equal:
            return Exit.LOST
        return Exit.FAILURE if self.pages_leaked or self.pages_corrupt else Exit.OK


def summarize(
    plan: ReplayPlan, drivers: Sequence[DriverReport], workers: Sequence[WorkerSnapshot], coordinators_lost: int = 0
) -> ReplayReport:
    """One report of all ranks', in rank order."""
    first, counters = drivers[0].tally, workers[0]
    different = list(differences(drivers, workers))
    leaks = [leak for worker in workers for leak in leaks_of(worker)]
    seconds = max(driver.seconds for driver in drivers)
    bytes_moved = sum(copies.bytes for worker in workers for copies in worker.copies)
    step_ns = sorted(ns for driver in drivers for ns in driver.step_ns)
    advance_ns = sum(ns for driver in drivers for ns in driver.advance_ns)
    return ReplayReport(
        trace=plan.options.trace,
        agreement=plan.options.agreement,
        ranks=plan.group.world_size,
        tp=plan.group.tp,
        pp=plan.group.pp,
        lag=plan.group.lag,
        settled=plan.options.settle,
        device_pages=plan.device_pages,
        host_pages=plan.host_pages,
        requests=first.requests,
        skipped=first.skipped,
        retries=first.retries,
        repeats=first.repeats,
        steps=first.steps,
        pages_total=first.pages_total,
        pages_hit=first.pages_hit_device + first.pages_hit_host,
        pages_hit_by_tier={Tier.DEVICE.value: first.pages_hit_device, Tier.HOST.value: first.pages_hit_host},
        pages_loaded=first.pages_loaded,
        pages_evicted=counters.pages_evicted,
        pages_verified=sum(driver.tally.pages_verified for driver in drivers),
        pages_corrupt=sum(driver.tally.pages_corrupt for driver in drivers),
        pages_leaked=sum(leak.pages for leak in leaks),
        leaks=leaks,
        loads_failed=sum(driver.tally.loads_failed for driver in drivers),
        commits=sum(found.count for found in counters.decisions if found.outcome is Outcome.COMMIT),
        aborts=_aborts(counters),
        aborts_first=first.aborts_first,
        retractions=counters.retractions,
        host_pages_here=[_here(worker) for worker in workers],
        pages_to_host=[_to_host(worker) for worker in workers],
        covered=_decided(counters, Path.COVERED),
        voted=_decided(counters, Path.VOTED),
        immediate=_decided(counters, Path.IMMEDIATE),
        bytes_moved=bytes_moved,
        bytes_moved_per_s=bytes_moved / seconds if seconds else 0.0,
        step_us_p50=percentile(step_ns, 50) / 1000,
        step_us_p99=percentile(step_ns, 99) / 1000,
        step_us_max=percentile(step_ns, 100) / 1000,
        advance_share=advance_ns / sum(step_ns) if step_ns else 0.0,
        digests_equal=not different,
        differences=different,
        divergence=next((found for worker in workers if (found := worker.first_divergence)), None),
        coordinators_lost=coordinators_lost,
        seconds=seconds,
    )


def differences(drivers: Sequence[DriverReport], workers: Sequence[WorkerSnapshot]) -> Iterator[str]:
    """What the ranks do not have in common though they must, by name, with every rank's value."""
    for name in ("requests", "skipped", "steps", "pages_total", "pages_hit_device", "pages_hit_host", "pages_loaded"):
        yield from _unequal(name, [getattr(driver.tally, name) for driver in drivers])
    for name in ("digest", "index_digest", "pages_cached", "pages_evicted", "retractions"):
        yield from _unequal(name, [getattr(worker, name) for worker in workers])
    yield from _unequal("decisions", [msgspec.json.encode(worker.decisions).decode() for worker in workers])
    divergences = [worker.divergences for worker in workers]
    if any(divergences):
        yield f"divergences seen by the coordinator: {divergences}"


def _here(worker: WorkerSnapshot) -> int:
    """Pages in this rank's own host memory, of the pool that holds the KV cache."""
    return next(pool.here for pool in worker.pools if pool.tier is Tier.HOST)


def _to_host(worker: WorkerSnapshot) -> int:
    return sum(copies.pages for copies in worker.copies if copies.direction == "device_to_host")


def leaks_of(worker: WorkerSnapshot) -> Iterator[Leak]:
    """After everything has ended a page is free or cached: whatever else holds one has kept it for good."""
    for pool in worker.pools:
        leak = Leak(
            rank=worker.rank,
            tier=pool.tier,
            pool=pool.name,
            reserved=pool.reserved,
            quarantined=pool.quarantined,
            stray=_stray(pool),
        )
        if leak.pages:
            yield leak


def percentile(ascending: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` of all do not exceed; 0 of none."""
    if not ascending:
        return 0
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)]


def _stray(pool: PoolSnapshot) -> int:
    """Slots neither cached nor in another state than used; slots lost from all states count too."""
    return pool.capacity - pool.free - pool.reserved - pool.quarantined - pool.cached


def _unequal(name: str, values: Sequence[object]) -> Iterator[str]:
    if any(value != values[0] for value in values):
        yield f"{name}: {', '.join(f'rank {rank} {value}' for rank, value in enumerate(values))}"


def _aborts(worker: WorkerSnapshot) -> dict[str, int]:
    aborts: dict[str, int] = {}
    for found in worker.decisions:
        if found.outcome is Outcome.ABORT and found.reason is not None:
            aborts[found.reason.value] = aborts.get(found.reason.value, 0) + found.count
    return dict(sorted(aborts.items()))


def _decided(worker: WorkerSnapshot, path: Path) -> int:
    return sum(found.count for found in worker.decisions if found.path is path)
