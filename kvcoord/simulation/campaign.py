"""Many seeds, one after another: what was done, what was found, and for what was found a short way to see it again."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kvcoord.simulation.faults import Fault, draw_faults
from kvcoord.simulation.shape import Options, draw_shape
from kvcoord.simulation.violation import Violation
from kvcoord.simulation.world import World

SHRINK_RUNS_MAX: Final = 80

OnProgress = Callable[[int, int], None]
"""Is told how many seeds are done, and how many of them broke a promise."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A promise that a seed broke: with the fewest faults that were found to break it, and the story."""

    seed: int
    promise: str
    detail: str
    operation: str
    at_s: float
    faults: list[str]
    story: list[str]


class SimulationReport(msgspec.Struct, kw_only=True):
    """What a campaign did. `faults` by kind, `promises`: how often each was looked at."""

    seeds: int = 0
    steps: int = 0
    operations: int = 0
    recoveries: int = 0
    faults: dict[str, int] = {}
    promises: dict[str, int] = {}
    violations: list[Finding] = []


def make_world(options: Options, seed: int, faults: list[Fault] | None = None) -> World:
    """The world of a seed, with other faults than its own if some are given."""
    shape = draw_shape(options, seed)
    chosen = draw_faults(options, shape, seed) if faults is None else faults
    return World(shape, seed, chosen, options.fault_s)


def broken_by(world: World) -> Violation | None:
    """Runs a world to its end. The promise that it broke, if it did."""
    try:
        world.run()
    except Violation as violation:
        world.close()
        return violation
    return None


def campaign(options: Options, seeds: Iterable[int], on_progress: OnProgress | None = None) -> SimulationReport:
    """Runs each seed, and shrinks those that break a promise."""
    report = SimulationReport()
    for seed in seeds:
        world = make_world(options, seed)
        violation = broken_by(world)
        _add(report, world)
        if violation is not None:
            report.violations.append(shrink(options, world, violation))
        if on_progress is not None:
            on_progress(report.seeds, len(report.violations))
    return report


def shrink(options: Options, world: World, violation: Violation) -> Finding:
    """Takes away faults as long as the same promise is broken."""
    faults = [fault for fault in world.faults if fault.at_s <= world.agenda.now]
    runs = 0
    shorter = True
    while shorter and runs < SHRINK_RUNS_MAX:
        shorter = False
        for fault in list(faults):
            if runs >= SHRINK_RUNS_MAX:
                break
            runs += 1
            fewer = [held for held in faults if held is not fault]
            tried = make_world(options, world.seed, fewer)
            found = broken_by(tried)
            if found is not None and found.promise == violation.promise:
                faults, world, violation, shorter = fewer, tried, found, True
    return Finding(
        seed=world.seed,
        promise=violation.promise,
        detail=violation.detail,
        operation=violation.operation,
        at_s=world.agenda.now,
        faults=[f"{fault.at_s:.3f} {fault}" for fault in faults],
        story=world.story.tell(violation.operation),
    )


def _add(report: SimulationReport, world: World) -> None:
    report.seeds += 1
    report.steps += world.steps
    report.operations += world.promises.operations
    report.recoveries += max(0, len(world.activations) - 1)
    for kind, count in world.faults_begun.items():
        report.faults[kind.value] = report.faults.get(kind.value, 0) + count
    for cause in ("lost", "repeated", "cut"):
        if world.network.counts[cause]:
            name = f"messages_{cause}"
            report.faults[name] = report.faults.get(name, 0) + world.network.counts[cause]
    for promise, count in world.promises.checks.items():
        report.promises[promise] = report.promises.get(promise, 0) + count
