"""One rank's worker process: the production worker machine, with simulated memory, copies and sockets.

It does what the worker's shell does: one connection at a time, what a former one delivers is dropped; an engine's life
is one membership; a failed machine answers with its failure until somebody starts the process again.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from kvcoord.controller.assembly import make_worker
from kvcoord.controller.effects import MapHosts, Reply, StartCopy
from kvcoord.controller.state import CacheState
from kvcoord.controller.worker import WorkerEffect, WorkerMachine
from kvcoord.domain import OperationId, Reason, Tier
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.effects import Attach, Note, SendUp
from kvcoord.protocol.local import Answer, Call
from kvcoord.protocol.rank import RankMachine
from kvcoord.simulation.asked import Asked
from kvcoord.simulation.memory import OpenCopy, SymbolicMemory, WatchedPool
from kvcoord.simulation.network import Envelope, Way
from kvcoord.simulation.process import Process, SkewedClock
from kvcoord.simulation.surroundings import Surroundings
from kvcoord.simulation.violation import Violation

_DECODER = coordinator_decoder()

ANSWER_DELAY_S: Final = 0.0001
"""From what a machine answers to its engine, which hears all answers of that time at once."""


class Engine(Protocol):
    """What a rank's worker sees of its engine."""

    session: int
    asked: dict[int, Asked]

    def hear(self, answers: list[tuple[int, Answer]]) -> None: ...

    def disconnected(self) -> None: ...

    def connected(self) -> None: ...


class WatchedDigest(Digest):
    """Tells of every event that the production digest is given, with its position in this history."""

    __slots__ = ("_told", "count")

    def __init__(self, events_kept: int, told: Callable[[int, str], None]) -> None:
        super().__init__(events_kept)
        self.count = 0
        self._told = told

    def apply(self, event: str) -> None:
        super().apply(event)
        self._told(self.count, event)
        self.count += 1


class CopyWeather:
    """What is wrong with the copies of a rank now."""

    __slots__ = ("fail_share", "hung", "slow_s", "stuck")

    def __init__(self) -> None:
        self.fail_share = 0.0
        self.slow_s = 0.0
        self.stuck = 0
        """Copies that begin now end when it is 0 again."""
        self.hung = 0
        """Copies that begin now never end."""


class SimulatedRank(Process):
    """`boot` starts the process, `crash` ends it with everything it held but the engine's device memory."""

    def __init__(self, world: Surroundings, number: int, clock: SkewedClock) -> None:
        super().__init__(f"rank {number}", world.agenda, clock)
        self.number = number
        self.incarnation = 0
        self.worker: WorkerMachine
        self.memory: SymbolicMemory
        self.engine: Engine | None = None
        self.copies: dict[OperationId, OpenCopy] = {}
        self.copy_weather = CopyWeather()
        self.held: list[OpenCopy] = []
        """Copies that do not end for now."""
        self._world = world
        self._config = world.shape.worker_config(number)
        self._shares = world.shape.shares(number)
        self._reach = b""
        self._committed: set[OperationId] = set()
        """Operations of this history."""
        self._unreached: set[int] = set()
        """Shares that were gone when they were to be mapped."""
        self._random = random.Random(f"{world.seed}/copies/{number}")
        self._answers: list[tuple[int, Answer]] = []
        self._attachment = 0
        self._coordinator = 0

    @property
    def machine(self) -> RankMachine:
        assert self.worker.rank is not None
        return self.worker.rank

    @property
    def pools(self) -> list[WatchedPool]:
        """All pools, device first."""
        tiers = self.worker.cache.state.pools
        return [pool for pool in (*tiers.device, *tiers.host) if isinstance(pool, WatchedPool)]

    # --- life -----------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new process: empty memory, a new incarnation."""
        self.born()
        self.memory = SymbolicMemory(self._config.device_slots, self._config.host_slots, self._shares)
        self._reach = f"{self.number}/{self.life}".encode()
        self._unreached.clear()
        self._new_machine()
        self._event(self.worker.start(self.now()))
        if self.engine is not None:
            self.engine.connected()

    def crash(self) -> None:
        peer, index = self.peer, self._coordinator
        self.vanish()
        self.killed()
        self.copies.clear()
        self.held.clear()
        self._answers.clear()
        self._world.lost_peer(index, peer)
        if self.engine is not None:
            self.engine.disconnected()

    def vanish(self) -> None:
        """What this process held ends with it: no reservation is left to be settled."""
        for pool in self.pools:
            pool.touched.clear()
        self.worker.cache.abandon()

    def engine_gone(self, session: int) -> None:
        """The engine's process has ended: so does this membership, and the next one waits for the next engine."""
        self.take(partial(self._begin_again, session))

    def tick(self) -> None:
        self._event(self.worker.tick(self.now()))

    @property
    def peer(self) -> bytes:
        """This end of the connection, as the coordinator knows it."""
        return f"{self.number}/{self.incarnation}/{self._attachment}".encode()

    def _begin_again(self, session: int) -> None:
        self.memory.next_engine()
        self.worker.closed(session)
        self._event(self.worker.leave(self.now()))
        self._restart_machine()

    def _restart_machine(self) -> None:
        if self.worker.left and not self.worker.copies_open:
            self.worker.cache.abandon()
            asked, pages = self.worker.waiting(), self.worker.bequeath()
            self._new_machine()
            self.worker.host.inherit(pages, self.worker.cache.state)
            self._event(self.worker.start(self.now()))
            for session, number, call in asked:
                self._event(self.worker.call(session, number, call, self.now()))

    def _new_machine(self) -> None:
        self._world.incarnations += 1
        self.incarnation = self._world.incarnations
        self.worker = make_worker(self._config, self.incarnation, self._watch)
        self.worker.host.reached_by(self._reach)

    def _watch(self, state: CacheState) -> None:
        """Puts watched pools and a watched digest into a cache that has just been made."""
        for pools in (state.pools.device, state.pools.host):
            pools[:] = [WatchedPool(pool, self._misused, self._elsewhere) for pool in pools]
        history = self.machine.history if hasattr(self, "worker") else 0
        self._committed.clear()
        state.digest = WatchedDigest(self._config.limits.decisions_kept_max, partial(self._applied, history))

    def _applied(self, history: int, index: int, event: str) -> None:
        if event.startswith("commit "):
            self._committed.add(event.split()[1])
        self._world.promises.event(self, history, index, event)

    def _misused(self, what: str) -> None:
        raise Violation("quiescence", f"{self.name}: {what}", what.rpartition(" ")[2])

    def _elsewhere(self, pool: str, slot: int) -> str:
        """The copies of other ranks that hold the same bytes which touch this slot, for what is committed here as well.

        A rank that is ahead may copy for more: it has evicted what this one is about to.
        """
        assert self._shares is not None
        holders = [rank for rank in self._world.ranks if rank.number in self._shares.holders and rank is not self]
        touched = [
            watched.touched.get(slot, "")
            for rank in holders
            if rank.alive
            for watched in rank.pools
            if watched.name == pool
        ]
        return " ".join([name for held in touched for name in held.split() if name in self._committed])

    # --- engine ---------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """The engine begins a life."""
        self.take(lambda: self.worker.registered(self._world.shape.model))

    def call(self, session: int, calls: list[tuple[int, Call]]) -> None:
        """What the engine asks at one moment. Nothing comes back when the process is dead: the engine knows."""
        self.take(lambda: self._calls(session, calls))

    def _calls(self, session: int, calls: list[tuple[int, Call]]) -> None:
        for number, call in calls:
            self._event(self.worker.call(session, number, call, self.now()))

    # --- group ----------------------------------------------------------------------------------------------------

    def connected_to(self, index: int) -> bool:
        return self.alive and self._coordinator == index and not self.worker.left

    def disconnected(self, peer: bytes) -> None:
        """The transport says that this connection is gone."""
        self.take(lambda: self._event(self.worker.disconnected(self.now())) if peer == self.peer else None)

    def unconnected(self, peer: bytes) -> None:
        """The transport says that nobody is at the address of this connection."""
        self.take(lambda: self._event(self.worker.unconnected(self.now())) if peer == self.peer else None)

    def receive(self, envelope: Envelope) -> None:
        """One message of a coordinator."""
        self.take(lambda: self._step(envelope))

    def _step(self, envelope: Envelope) -> None:
        if not self.is_current(envelope.peer):
            self._world.promises.count("late_connection")
            return
        message = _DECODER.decode(envelope.payload)
        promises = self._world.promises
        before = promises.before_rank(self, message)
        effects = self.worker.receive(message, self.now())
        promises.after_message_down(self, message, before, effects)
        self._event(effects)

    def is_current(self, peer: bytes) -> bool:
        """What comes over a former connection, or for a former life, is dropped."""
        return peer == self.peer

    # --- effects --------------------------------------------------------------------------------------------------

    def _event(self, effects: list[WorkerEffect]) -> None:
        world = self._world
        for effect in effects:
            if isinstance(effect, SendUp):
                world.promises.sent(self, effect.message)
                payload = encode(effect.message)
                world.network.send(Envelope(Way.UP, self.number, self._coordinator, self.peer, payload, effect.message))
            elif isinstance(effect, Reply):
                if self.engine is not None and effect.session == self.engine.session:
                    self._answer(effect)
            elif isinstance(effect, StartCopy):
                self._start_copy(effect)
            elif isinstance(effect, MapHosts):
                self._follow(effect)
            elif isinstance(effect, Attach):
                self._attachment += 1
                self._coordinator = effect.index
                self._world.connecting(self)
            elif isinstance(effect, Note):
                world.story.note(self.name, effect)
        self.set_alarm(self.worker.deadline())
        world.promises.after_rank(self)

    def _answer(self, reply: Reply) -> None:
        if not self._answers:
            self.agenda.after(ANSWER_DELAY_S, partial(self._flush, self.life, reply.session))
        self._answers.append((reply.call, reply.answer))

    def _flush(self, life: int, session: int) -> None:
        """Hands over what is answered, unless the engine that asked has ended meanwhile."""
        answers, self._answers = self._answers, []
        if life == self.life and self.engine is not None and self.engine.session == session:
            self.engine.hear(answers)

    # --- copies ---------------------------------------------------------------------------------------------------

    def _follow(self, effect: MapHosts) -> None:
        """Reads the host pages of these ranks in their memory, unless they have died since they said where it is."""
        assert self._shares is not None
        self._unreached.clear()
        for share, rank in enumerate(self._shares.holders):
            other = self._world.ranks[rank]
            if other.alive and other.reach == effect.named[rank]:
                self.memory.follow(share, other.memory)
            else:
                self._unreached.add(share)
        seconds = self._random.choice((0.001, 0.01, 0.5))
        self.agenda.after(seconds, partial(self._mapped, self.life, effect.history))

    def _mapped(self, life: int, history: int) -> None:
        if life == self.life:
            self.take(lambda: self._event(self.worker.hosts_mapped(history, self.now())))

    @property
    def reach(self) -> bytes:
        """Names the memory of this life."""
        return self._reach

    def _part(self, effect: StartCopy) -> StartCopy:
        """What this rank copies: to the host only what it keeps."""
        shares = self._shares
        if shares is None or effect.source is Tier.HOST:
            return effect
        pairs = [
            [pair for pair in zip(*held, strict=True) if shares.share_of(pair[1]) == shares.own]
            for held in zip(effect.source_slots, effect.destination_slots, strict=True)
        ]
        source = tuple([[slot for slot, _ in held] for held in pairs])
        return StartCopy(effect.operation, effect.source, source, tuple([[slot for _, slot in held] for held in pairs]))

    def _start_copy(self, effect: StartCopy) -> None:
        weather = self.copy_weather
        effect = self._part(effect)
        failing = self._random.random() < weather.fail_share
        if self._shares is not None and effect.source is Tier.HOST:
            failing |= any(self._shares.share_of(slot) in self._unreached for slot in effect.source_slots[0])
        copy = OpenCopy(effect, self.memory, failing)
        self._world.promises.copy_started(self, copy)
        self.copies[copy.operation] = copy
        self._touch(copy, WatchedPool.touch)
        self.memory.tear(copy.destination, copy.destination_slots)
        seconds = self._random.choice((0.001, 0.01, 0.05)) + weather.slow_s * self._random.random()
        if weather.hung:
            return
        if weather.stuck:
            self.held.append(copy)
        else:
            self.agenda.after(seconds, partial(self.end_copy, copy, self.life))

    def release_held(self) -> None:
        """Copies that did not end do so now."""
        held, self.held = self.held, []
        for copy in held:
            self.end_copy(copy, self.life)

    def end_copy(self, copy: OpenCopy, life: int) -> None:
        """This copy is over, unless the process is."""
        if life == self.life and copy.operation in self.copies:
            self.take(partial(self._copy_ended, copy))

    def _copy_ended(self, copy: OpenCopy) -> None:
        del self.copies[copy.operation]
        self._world.promises.copy_ending(self, copy)
        if not copy.failing and (copy.destination is Tier.HOST or copy.engine_life == self.memory.engine_life):
            self.memory.write(copy.destination, copy.destination_slots, copy.contents)
        self._touch(copy, WatchedPool.untouch)
        error = Reason.COPY_FAILED if copy.failing else None
        self._event(self.worker.copy_ended(copy.operation, error, self.now()))
        self._restart_machine()

    def _touch(self, copy: OpenCopy, act: Callable[[WatchedPool, list[int], OperationId], None]) -> None:
        """Marks the slots that belong to our pools: an engine without lockstep owns its device slots itself."""
        pools = self.worker.cache.state.pools
        for tier, slots in ((copy.source, copy.source_slots), (copy.destination, copy.destination_slots)):
            if tier is Tier.HOST or self._world.shape.group.lockstep:
                for pool, held in zip(pools.of(tier), slots, strict=True):
                    assert isinstance(pool, WatchedPool)
                    act(pool, held, copy.operation)
