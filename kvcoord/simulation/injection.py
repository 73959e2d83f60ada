"""Makes faults happen in a world, and end. Knows processes and weather by what can be done to them."""

from functools import partial
from typing import Protocol

from kvcoord.simulation.agenda import Agenda
from kvcoord.simulation.coordinator import SimulatedCoordinator
from kvcoord.simulation.faults import Fault, FaultKind
from kvcoord.simulation.lockstep import RESTART_S, LockstepEngine
from kvcoord.simulation.network import Network, Way, Weather
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.story import Story
from kvcoord.simulation.streaming import StreamingEngine


class Breakable(Protocol):
    """The world as faults see it."""

    agenda: Agenda
    story: Story
    network: Network
    ranks: list[SimulatedRank]
    engines: list[LockstepEngine | StreamingEngine]
    coordinators: list[SimulatedCoordinator]
    faults_begun: dict[FaultKind, int]
    failures_allowed: set[str]

    def restart_rank(self, rank: SimulatedRank, life: int) -> None: ...

    def restart_coordinator(self, coordinator: SimulatedCoordinator, life: int) -> None: ...


def begin(world: Breakable, fault: Fault) -> None:
    """Makes a fault happen, and arranges its end."""
    world.story.fault(str(fault))
    world.faults_begun[fault.kind] = world.faults_begun.get(fault.kind, 0) + 1
    if not _on_process(world, fault):
        _on_weather(world, fault)


def _on_process(world: Breakable, fault: Fault) -> bool:
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


def _on_weather(world: Breakable, fault: Fault) -> None:
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
    elif fault.kind is FaultKind.HANG_COPIES:
        copies.hung += 1
        world.failures_allowed.add("DeadlineExceeded")
        later(partial(_restart_hung, world, fault.rank))
    else:
        for weather in _weathers(world, fault):
            _worsen(weather, fault)
            later(partial(_clear, weather, fault))


def _let_copies_end(world: Breakable, number: int) -> None:
    rank = world.ranks[number]
    rank.copy_weather.stuck -= 1
    if not rank.copy_weather.stuck:
        rank.release_held()


def _restart_hung(world: Breakable, number: int) -> None:
    rank = world.ranks[number]
    rank.copy_weather.hung -= 1
    if rank.alive:
        rank.crash()
        world.agenda.after(RESTART_S, partial(world.restart_rank, rank, rank.life))


def _weathers(world: Breakable, fault: Fault) -> list[Weather]:
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
