"""The process of one rank in an agreement benchmark: opens its subjects, then times the blocks it is told to.

Run as `python -m kvcoord.load.bench.rank`; its plan is the first line of its standard input. See `dialogue`.
"""

import gc
import sys
import time
from collections.abc import Iterator
from random import Random
from time import perf_counter_ns

from kvcoord.errors import PeerUnavailable
from kvcoord.load.bench.dialogue import Block, Opened, RankPlan, Timed, ToRank
from kvcoord.load.bench.subjects import Perform, open_subjects
from kvcoord.load.dialogue import Lines


def main() -> int:
    """Until the end of its input."""
    lines: Lines[ToRank] = Lines(ToRank, sys.stdin.buffer, sys.stdout.buffer)
    plan = lines.hear()
    assert isinstance(plan, RankPlan)
    acts, closing = open_subjects(plan)
    gc.collect()
    gc.freeze()
    lines.say(Opened())
    for block in _blocks(lines):
        lag = block.lag if (block.subject, block.act, 0) not in acts else 0
        lines.say(Timed(timed(block, plan.rank, plan.ranks, acts[block.subject, block.act, lag])))
    for close in closing:
        close()
    return 0


def _blocks(lines: Lines[ToRank]) -> Iterator[Block]:
    """What this rank is told, until whoever tells has no more."""
    while True:
        try:
            block = lines.hear()
        except PeerUnavailable:
            return
        assert isinstance(block, Block)
        yield block


def timed(block: Block, rank: int, ranks: int, perform: Perform) -> list[int]:
    """Performs the acts of a block, each at its time, and returns what each took, in nanoseconds."""
    ns: list[int] = []
    _sleep_until(block.start_s)
    for number, late_s in enumerate(lateness(block, rank, ranks)):
        if block.period_s:
            _sleep_until(block.start_s + number * block.period_s + late_s)
        name = f"{block.number}/{number}"
        begun = perf_counter_ns()
        perform(name, block.votes)
        ns.append(perf_counter_ns() - begun)
    return ns


def lateness(block: Block, rank: int, ranks: int) -> Iterator[float]:
    """How much later than planned this rank arrives at each act, in seconds."""
    own, shared = Random(block.number * ranks + rank), Random(block.number)
    for _ in range(block.count):
        late_rank, late_s = shared.randrange(ranks), shared.random() * block.late_s
        yield own.random() * block.spread_s + (late_s if late_rank == rank else 0.0)


def _sleep_until(at_s: float) -> None:
    early_s = at_s - time.monotonic()
    if early_s > 0:
        time.sleep(early_s)


if __name__ == "__main__":
    sys.exit(main())
