"""Which benchmarks there are, and running some of them one after another."""

from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from kvcoord.load.bench.agreement import QUICK, Effort, agreement
from kvcoord.load.bench.budgets import budgets
from kvcoord.load.bench.coordinator import coordinator
from kvcoord.load.bench.copies import copies
from kvcoord.load.bench.index import PeerPlace, index
from kvcoord.load.bench.local import local
from kvcoord.load.bench.pressure import LoadOptions, load
from kvcoord.load.bench.recovery import recovery
from kvcoord.load.bench.replays import TraceOptions, replays
from kvcoord.load.bench.result import Result
from kvcoord.load.bench.scale import scale
from kvcoord.load.plan import ReplayOptions
from kvcoord.load.trace import DEMO


class Benchmark(StrEnum):
    """What can be asked for."""

    AGREEMENT = "agreement"
    COORDINATOR = "coordinator"
    COPY = "copy"
    INDEX = "index"
    RECOVERY = "recovery"
    LOCAL = "local"
    SCALE = "scale"
    LOAD = "load"
    TRACE = "trace"
    BUDGETS = "budgets"
    ALL = "all"


class SuiteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the benchmarks of one run have in common."""

    ranks: list[int]
    quick: bool = False
    sidecar: bool = True
    sglang: PeerPlace | None = None
    load: LoadOptions | None = None
    trace: TraceOptions | None = None

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else Effort()


OnCase = Callable[[str], None]


async def run(benchmark: Benchmark, options: SuiteOptions, on_case: OnCase = lambda _: None) -> list[Result]:
    """Runs one, or all but `load` and `trace`, which take minutes.

    `budgets` and `all` put the budgets first; `budgets` returns the benchmarks behind them too.
    """
    if benchmark in (Benchmark.BUDGETS, Benchmark.ALL):
        judged, results = await budgets(options.ranks, options.effort, sglang=options.sglang, on_case=on_case)
        if benchmark is Benchmark.ALL:
            results.append(await scale(quick=options.quick, on_case=on_case))
        return [judged, *results]
    if benchmark is Benchmark.LOAD:
        return await load(options.load or LoadOptions(replay=ReplayOptions(ranks=min(options.ranks))), on_case)
    return [await _one(benchmark, options, on_case)]


def _one(benchmark: Benchmark, options: SuiteOptions, on_case: OnCase) -> Awaitable[Result]:
    quick = options.quick
    if benchmark is Benchmark.AGREEMENT:
        return agreement(options.ranks, options.effort, sidecar=options.sidecar, on_case=on_case)
    if benchmark is Benchmark.COORDINATOR:
        return coordinator(quick=quick, on_case=on_case)
    if benchmark is Benchmark.COPY:
        return copies(quick=quick, on_case=on_case)
    if benchmark is Benchmark.INDEX:
        return index(quick=quick, peer=options.sglang, on_case=on_case)
    if benchmark is Benchmark.RECOVERY:
        return recovery(min(options.ranks), runs=1 if quick else 5, on_case=on_case)
    if benchmark is Benchmark.LOCAL:
        return local(options.effort)
    if benchmark is Benchmark.TRACE:
        return replays(options.trace or TraceOptions(trace=str(DEMO), ranks=4), quick=quick, on_case=on_case)
    return scale(quick=quick, on_case=on_case)
