"""What goes wrong in a world, and when: a list drawn from the seed, so that a run can be made again with fewer."""

import random
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kvcoord.simulation.network import Way, Weather

if TYPE_CHECKING:
    from kvcoord.simulation.shape import Options, Shape
    from kvcoord.simulation.world import World


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


def draw_faults(options: "Options", shape: "Shape", seed: int) -> list[Fault]:
    """The faults of a seed. One seed in eight has none."""
    rng = random.Random(f"{seed}/faults")
    count = rng.choice((0, 1, 2, 3, 4, 6, 8, 12)) if options.faults is None else options.faults
    return sorted((_draw(rng, options, shape) for _ in range(count)), key=lambda fault: fault.at_s)


def _draw(rng: random.Random, options: "Options", shape: "Shape") -> Fault:
    kind = rng.choice([kind for kind in FaultKind if not options.fault_kinds or kind in options.fault_kinds])
    amount = 0.0
    if kind in (FaultKind.LOSE, FaultKind.REPEAT, FaultKind.FAIL_COPIES):
        amount = rng.choice((0.02, 0.1, 0.3))
    elif kind in (FaultKind.DELAY, FaultKind.REORDER, FaultKind.SLOW_COPIES):
        amount = rng.choice((0.01, 0.1, 1.0))
    return Fault(
        kind,
        rng.uniform(0.0, options.fault_s),
        rng.choice(_LASTS_S) * rng.uniform(0.5, 1.5),
        rng.randrange(shape.ranks),
        rng.randrange(shape.coordinators),
        amount,
    )


def begin(world: "World", fault: Fault) -> None:
    """Makes a fault happen, and arranges its end."""
    world.story.fault(str(fault))
    world.faults_begun[fault.kind] = world.faults_begun.get(fault.kind, 0) + 1
    if not _on_process(world, fault):
        _on_weather(world, fault)


def _on_process(world: "World", fault: Fault) -> bool:
    """Whether it was a fault of a process."""
    kind, later = fault.kind, partial(world.agenda.after, fault.lasts_s)
    if kind in (FaultKind.CRASH_COORDINATOR, FaultKind.PAUSE_COORDINATOR):
        coordinator = world.coordinators[fault.coordinator]
        if coordinator.alive and kind is FaultKind.CRASH_COORDINATOR:
            coordinator.crash()
            later(partial(world.restart_coordinator, coordinator, coordinator.life))
        elif coordinator.alive:
            coordinator.pause()
            later(coordinator.resume)
        return True
    rank = world.ranks[fault.rank]
    engine = world.engines[fault.rank]
    if kind is FaultKind.CRASH_RANK:
        if rank.alive:
            rank.crash()
            later(partial(world.restart_rank, rank, rank.life))
    elif kind is FaultKind.PAUSE_RANK:
        rank.pause()
        later(rank.resume)
    elif kind is FaultKind.RESTART_ENGINE:
        if rank.alive and not rank.paused:
            engine.restart()
    elif kind is FaultKind.PAUSE_ENGINE:
        engine.paused = True
        later(engine.resume)
    else:
        return False
    return True


def _on_weather(world: "World", fault: Fault) -> None:
    later = partial(world.agenda.after, fault.lasts_s)
    copies = world.ranks[fault.rank].copy_weather
    if fault.kind is FaultKind.SLOW_COPIES:
        copies.slow_s = fault.amount
        later(partial(setattr, copies, "slow_s", 0.0))
    elif fault.kind is FaultKind.FAIL_COPIES:
        copies.fail_share = fault.amount
        later(partial(setattr, copies, "fail_share", 0.0))
    elif fault.kind is FaultKind.HOLD_COPIES:
        copies.stuck += 1
        world.failures_allowed.add("DeadlineExceeded")
        later(partial(_let_copies_end, world, fault.rank))
    else:
        for weather in _weathers(world, fault):
            _worsen(weather, fault)
            later(partial(_clear, weather, fault))


def _let_copies_end(world: "World", number: int) -> None:
    rank = world.ranks[number]
    rank.copy_weather.stuck -= 1
    if not rank.copy_weather.stuck:
        rank.release_held()


def _weathers(world: "World", fault: Fault) -> list[Weather]:
    """The directions of links that it concerns."""
    ways = {FaultKind.CUT_UP: [Way.UP], FaultKind.CUT_DOWN: [Way.DOWN]}.get(fault.kind, [Way.UP, Way.DOWN])
    everywhere = fault.kind is FaultKind.ISOLATE
    coordinators = [c.index for c in world.coordinators if everywhere or c.index == fault.coordinator]
    return [world.network.weather(way, fault.rank, coordinator) for way in ways for coordinator in coordinators]


def _worsen(weather: Weather, fault: Fault) -> None:
    if fault.kind is FaultKind.LOSE:
        weather.lost = fault.amount
    elif fault.kind is FaultKind.REPEAT:
        weather.repeated = fault.amount
    elif fault.kind is FaultKind.DELAY:
        weather.delay_s = fault.amount
    elif fault.kind is FaultKind.REORDER:
        weather.disorder_s = fault.amount
    else:
        weather.cut += 1


def _clear(weather: Weather, fault: Fault) -> None:
    if fault.kind is FaultKind.LOSE:
        weather.lost = 0.0
    elif fault.kind is FaultKind.REPEAT:
        weather.repeated = 0.0
    elif fault.kind is FaultKind.DELAY:
        weather.delay_s = 0.0
    elif fault.kind is FaultKind.REORDER:
        weather.disorder_s = 0.0
    else:
        weather.cut -= 1
