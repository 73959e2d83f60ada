"""What goes wrong in a world, and when: a list drawn from the seed, so that a run can be made again with fewer."""

import random
from enum import StrEnum
from typing import Final

import msgspec

from kvcoord.simulation.shape import Options, Shape


class FaultKind(StrEnum):
    CRASH_COORDINATOR = "crash_coordinator"
    CRASH_RANK = "crash_rank"
    RESTART_ENGINE = "restart_engine"
    PAUSE_COORDINATOR = "pause_coordinator"
    PAUSE_RANK = "pause_rank"
    PAUSE_ENGINE = "pause_engine"
    CUT = "cut"
    CUT_UP = "cut_up"
    CUT_DOWN = "cut_down"
    ISOLATE = "isolate"
    LOSE = "lose"
    REPEAT = "repeat"
    DELAY = "delay"
    REORDER = "reorder"
    SLOW_COPIES = "slow_copies"
    FAIL_COPIES = "fail_copies"
    HOLD_COPIES = "hold_copies"
    HANG_COPIES = "hang_copies"
    """Copies that begin now never end. After its time the process is started again."""


class Fault(msgspec.Struct, frozen=True):
    """One fault, from `at_s` on for `lasts_s`. `rank` or `coordinator` -1: all of them. `amount`: share or seconds."""

    kind: FaultKind
    at_s: float
    lasts_s: float
    rank: int = -1
    coordinator: int = -1
    amount: float = 0.0

    def __str__(self) -> str:
        rank = "" if self.rank < 0 else f" rank {self.rank}"
        coordinator = "" if self.coordinator < 0 else f" coordinator {self.coordinator}"
        amount = f" {self.amount:.3f}" if self.amount else ""
        return f"{self.kind}{rank}{coordinator}{amount} for {self.lasts_s:.3f} s"


_LASTS_S: Final = (0.05, 0.4, 1.0, 2.5, 6.0)


def draw_faults(options: Options, shape: Shape, seed: int) -> list[Fault]:
    """The faults of a seed. One seed in eight has none."""
    rng = random.Random(f"{seed}/faults")
    count = rng.choice((0, 1, 2, 3, 4, 6, 8, 12)) if options.faults is None else options.faults
    return sorted((_draw(rng, options, shape) for _ in range(count)), key=lambda fault: fault.at_s)


def _draw(rng: random.Random, options: Options, shape: Shape) -> Fault:
    kind = rng.choice([kind for kind in FaultKind if not options.fault_kinds or kind in options.fault_kinds])
    amount = 0.0
    if kind in (FaultKind.LOSE, FaultKind.REPEAT, FaultKind.FAIL_COPIES):
        amount = rng.choice((0.02, 0.1, 0.3))
    elif kind in (FaultKind.DELAY, FaultKind.REORDER, FaultKind.SLOW_COPIES):
        amount = rng.choice((0.01, 0.1, 1.0))
    at_s = rng.uniform(0.0, options.fault_s)
    lasts_s = rng.choice(_LASTS_S) * rng.uniform(0.5, 1.5)
    return Fault(
        kind,
        at_s,
        lasts_s if kind is not FaultKind.HANG_COPIES else lasts_s + shape.timeouts.copy_timeout_s,
        rng.randrange(shape.ranks),
        rng.randrange(shape.coordinators),
        amount,
    )
