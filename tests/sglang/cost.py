"""What a scheduler step pays for agreement: SGLang's own `check_hicache_events` and kvcoord's, side by side in one run.

    python -m tests.sglang.cost [RANKS ...]

Both caches live in the same processes and take turns, step by step, so both see the same machine. A step is 5 ms, and
ranks arrive up to 1 ms apart. Prints medians and 99th percentiles over all ranks, and their ratio.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from tests.sglang.engine import KVCOORD, STOCK, Engine, Groups
from tests.sglang.world import run_ranks, values

STEP_S: Final = 0.005
SKEW_S: Final = 0.001


def measure(tp: int, steps: int, *, busy: bool = False) -> dict[str, list[float]]:
    """Seconds that each call took, by backend. `busy`: every few steps a request has written something."""

    def on_rank(groups: Groups) -> dict[str, list[float]]:
        engines = {"stock": Engine(groups, backend=STOCK), "kvcoord": Engine(groups, backend=KVCOORD)}
        taken: dict[str, list[float]] = {name: [] for name in engines}
        rng = random.Random(groups.rank)
        for step in range(steps):
            for name, engine in engines.items():
                if busy and step % 5 == 0:
                    first = step * 100 % 100_000
                    engine.insert(range(first, first + 16))
                time.sleep(STEP_S + rng.random() * SKEW_S)
                taken[name].append(_timed(engine.step))
        engines["kvcoord"].close()
        return taken

    told = values(run_ranks(on_rank, tp=tp, limit_s=60.0 + steps * 4 * STEP_S))
    return {name: [value for rank in told for value in rank[name][20:]] for name in told[0]}


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main(ranks: list[int]) -> None:
    for tp in ranks:
        for busy in (False, True):
            taken = measure(tp, 400, busy=busy)
            median = {name: statistics.median(times) * 1e6 for name, times in taken.items()}
            late = {name: statistics.quantiles(times, n=100)[98] * 1e6 for name, times in taken.items()}
            print(
                f"tp={tp} {'busy' if busy else 'idle'}: stock {median['stock']:.0f} us (p99 {late['stock']:.0f}),"
                f" kvcoord {median['kvcoord']:.0f} us (p99 {late['kvcoord']:.0f}),"
                f" median 1/{median['stock'] / median['kvcoord']:.0f}, p99 1/{late['stock'] / late['kvcoord']:.0f}"
            )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [2, 4])
