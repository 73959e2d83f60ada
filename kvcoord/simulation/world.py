"""A whole group in one thread: ranks, engines, coordinators, network and time, from a seed and a list of faults.

It lives in three parts: the bad time, in which faults happen; the drain, in which engines end what they began; and the
end, when every rank has drained in one history. What does not end in time has broken Liveness.
"""

import random
from contextlib import suppress
from functools import partial
from typing import Final

from kvcoord.simulation import injection
from kvcoord.simulation.agenda import Agenda
from kvcoord.simulation.coordinator import SimulatedCoordinator
from kvcoord.simulation.faults import Fault, FaultKind
from kvcoord.simulation.lockstep import RESTART_S, LockstepEngine
from kvcoord.simulation.network import Envelope, Network, Way
from kvcoord.simulation.process import SkewedClock
from kvcoord.simulation.program import Program
from kvcoord.simulation.promises import Promises
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.shape import Shape
from kvcoord.simulation.story import Story
from kvcoord.simulation.streaming import StreamingEngine
from kvcoord.simulation.violation import Violation

QUIET_S_MAX: Final = 90.0
"""Within this time after the last fault every group has recovered and drained."""

WATCH_S: Final = 1.0

STEPS_MAX: Final = 500_000
"""A world that does more than this runs in a circle."""


class World:
    """`run` raises Violation. `failures_allowed`: errors that calls may raise without a promise being broken."""

    def __init__(self, shape: Shape, seed: int, faults: list[Fault], fault_s: float) -> None:
        self.shape = shape
        self.seed = seed
        self.faults = faults
        self.faultless = not faults
        self.agenda = Agenda()
        self.story = Story(self.agenda)
        self.program = Program(seed, shape.ranks)
        self.promises = Promises(self)
        self.network = Network(self.agenda, seed, self._deliver)
        self.incarnations = 0
        self.activations: set[tuple[int, int]] = set()
        self.faults_begun: dict[FaultKind, int] = {}
        self.failures_allowed = set() if self.faultless else {"GroupRenewed"}
        self.restarts_by_supervisor = 0
        self.steps = 0
        self.drain_from: int | None = None
        """The step (without lockstep: the operation) from which on engines begin nothing new."""
        self._fault_s = fault_s
        self._sessions = 0
        self._calls = 0
        rng = random.Random(f"{seed}/clocks")
        self.coordinators = [SimulatedCoordinator(self, index, _clock(rng)) for index in range(shape.coordinators)]
        self.ranks = [SimulatedRank(self, number, _clock(rng)) for number in range(shape.ranks)]
        make = LockstepEngine if shape.group.lockstep else StreamingEngine
        self.engines: list[LockstepEngine | StreamingEngine] = [make(self, rank) for rank in self.ranks]
        for rank, engine in zip(self.ranks, self.engines, strict=True):
            rank.engine = engine
        self._begin(rng)

    def _begin(self, rng: random.Random) -> None:
        for coordinator in self.coordinators:
            coordinator.boot()
        for rank in self.ranks:
            self.agenda.after(rng.random() * 0.5, partial(self.restart_rank, rank, rank.life))
        for fault in self.faults:
            self.agenda.at(fault.at_s, partial(injection.begin, self, fault))
        self.agenda.after(WATCH_S, self._watch)
        self.agenda.at(self._fault_s, self._drain)

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until everything has drained. Raises Violation."""
        try:
            while not self._ended():
                if self.steps > STEPS_MAX:
                    raise Violation("liveness", f"{self.steps} events and no end")
                self.steps += 1
                self.agenda.step()
            self.promises.finish()
            self._compare()
        except Violation:
            raise
        except Exception as error:
            raise Violation("invariant", f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Lets go of a world that has not come to rest, and of which nothing can be expected any more."""
        for rank in self.ranks:
            if rank.alive:
                with suppress(Exception):
                    rank.vanish()

    def run_until(self, time_s: float) -> None:
        """Until this moment of the world. For tests."""
        while self.agenda.now < time_s and self.agenda.step():
            self.steps += 1

    def _ended(self) -> bool:
        return (
            self.drain_from is not None
            and all(engine.done for engine in self.engines)
            and len({(rank.machine.history, rank.machine.stream.sequence) for rank in self.ranks}) == 1
            and all(rank.machine.active and rank.worker.host.settled and not rank.copies for rank in self.ranks)
        )

    def _drain(self) -> None:
        """The bad time is over (what still lasts ends by itself): engines agree where to stop."""
        self.story.fault("no more faults: engines drain")
        self.drain_from = max(self.shape.steps // 4, *(engine.step + 3 for engine in self.engines))

    def _watch(self) -> None:
        self.promises.watch()
        faults_end_s = max([self._fault_s, *(fault.at_s + fault.lasts_s for fault in self.faults)])
        if self.agenda.now > faults_end_s + self._rest_s():
            raise Violation("liveness", f"not at rest {self._rest_s():.0f} s after the faults: {self._open()}")
        self.agenda.after(WATCH_S, self._watch)

    def _rest_s(self) -> float:
        """How long a world may take to come to rest. Engines that are renewed late go all their steps again, and where
        messages are lost a step takes as long as it takes to say a thing twice."""
        return QUIET_S_MAX + (self.drain_from or 0) * self.shape.timeouts.heartbeat_interval_s

    def _open(self) -> str:
        """What keeps this world from its end."""
        lines = []
        for rank, engine in zip(self.ranks, self.engines, strict=True):
            calls = [f"{type(asked.call).__name__} since {asked.at_s:.1f}" for asked in engine.asked.values()]
            state = f"{rank.machine.state} at coordinator {rank.machine.coordinator_index}" if rank.alive else "dead"
            lines.append(
                f"{rank.name} is {state}, epoch {rank.machine.epoch}, step {engine.step}, done {engine.done},"
                f" open {rank.worker.cache.open_count()}, asked {calls[:3]}, {rank.machine.cause}"
            )
        return "; ".join(lines)

    def _compare(self) -> None:
        """At rest all ranks have the same."""
        if self.shape.group.lockstep:
            digests = {rank.worker.cache.state.tree.digest for rank in self.ranks}
            if len(digests) > 1:
                raise Violation("agreement", f"indexes differ at rest: {sorted(digests)}")
        chains = {rank.worker.cache.state.digest.chain for rank in self.ranks}
        if len(chains) > 1:
            raise Violation("order", f"digests differ at rest: {sorted(chains)}")

    # --- processes ------------------------------------------------------------------------------------------------

    def restart_rank(self, rank: SimulatedRank, life: int) -> None:
        if rank.life == life and not rank.alive:
            rank.boot()

    def restart_coordinator(self, coordinator: SimulatedCoordinator, life: int) -> None:
        if coordinator.life == life and not coordinator.alive:
            coordinator.boot()

    def supervise(self, rank: SimulatedRank) -> None:
        """A rank whose calls fail for good is started again by whoever looks after it."""
        self.restarts_by_supervisor += 1
        self.story.fault(f"{rank.name} is started again")
        rank.crash()
        self.agenda.after(RESTART_S, partial(self.restart_rank, rank, rank.life))

    def lost_peer(self, index: int, peer: bytes) -> None:
        """The transport tells a coordinator that a connection broke, half of the times."""
        if self.incarnations % 2:
            coordinator = self.coordinators[index]
            self.agenda.after(0.01, partial(self._tell_lost, coordinator, coordinator.life, peer))

    def _tell_lost(self, coordinator: SimulatedCoordinator, life: int, peer: bytes) -> None:
        if coordinator.life == life:
            coordinator.gone(peer)

    def connecting(self, rank: SimulatedRank) -> None:
        """A rank connects. Where nobody listens its transport says so, half of the times."""
        for coordinator in self.coordinators:
            if not coordinator.alive and rank.connected_to(coordinator.index) and self.incarnations % 2:
                self.agenda.after(0.005, partial(rank.unconnected, rank.peer))

    def lost_coordinator(self, index: int) -> None:
        """The transport of each rank that was connected there notices, half of the times."""
        for rank in self.ranks:
            if rank.connected_to(index) and (self.incarnations + rank.number) % 2:
                self.agenda.after(0.005, partial(rank.disconnected, rank.peer))

    def new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def new_call(self) -> int:
        self._calls += 1
        return self._calls

    def _deliver(self, envelope: Envelope) -> None:
        if envelope.way is Way.UP:
            self.coordinators[envelope.coordinator].receive(envelope)
        else:
            self.ranks[envelope.rank].receive(envelope)


def _clock(rng: random.Random) -> SkewedClock:
    return SkewedClock(rng.uniform(0.0, 1000.0), rng.choice((0.0, 0.0, 0.02, -0.02)))
