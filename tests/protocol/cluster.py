"""Ranks and coordinators in one thread, joined by a network that delivers what it is told to. The clock is set by hand.

Every message goes through the codec. A rank's connection is a peer of its coordinator; after an Attach the old one is
closed: what still comes over it to the rank is dropped, as its shell would do; what was sent over it may arrive late.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvcoord.domain import OperationId, Outcome
from kvcoord.protocol.codec import coordinator_decoder, encode, rank_decoder
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import (
    Activated,
    Apply,
    Attach,
    CoordinatorEffect,
    LogWanted,
    RankEffect,
    Send,
    SendUp,
)
from kvcoord.protocol.group import GroupLimits
from kvcoord.protocol.messages import (
    Activate,
    Decision,
    Divergence,
    Entry,
    FromCoordinator,
    FromRank,
    LogRequest,
    Numbered,
    Suspended,
    Value,
    Verdict,
)
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine

GROUP: Final = "g"
FINGERPRINT: Final[dict[str, str | int]] = {"page_bytes": 4096, "dtype": "bf16"}

_FENCED = Activate | Numbered | Verdict | Suspended | LogRequest | Divergence
"""What a coordinator says within an epoch."""

_UP = rank_decoder()
_DOWN = coordinator_decoder()


class Rank:
    """One process of a rank: its machine and what its owner has been told."""

    def __init__(self, name: str, machine: RankMachine) -> None:
        self.name = name
        self.machine = machine
        self.alive = False
        self.connection = 0
        self.coordinator = 0
        self.outcomes: dict[OperationId, tuple[Outcome, Value]] = {}
        self.entries: list[Entry] = []
        self.told: list[RankEffect] = []
        self.log: list[tuple[str, int]] = [("", 1)]

    @property
    def peer(self) -> bytes:
        return f"{self.name}.{self.connection}".encode()

    def decide(self, decision: Decision) -> None:
        """Takes an outcome as the owner does. One operation never has two."""
        outcome = (decision.outcome, decision.value)
        held = self.outcomes.setdefault(decision.operation, outcome)
        assert held == outcome, f"{self.name}: {decision.operation} is {held} and then {outcome}"


class Coordinator:
    """One address of a coordinator and the life that answers there now, if any."""

    def __init__(self, name: str, incarnation: int, limits: GroupLimits) -> None:
        self.name = name
        self.incarnation = incarnation
        self.limits = limits
        self.machine: CoordinatorMachine | None = CoordinatorMachine(incarnation, limits)

    def restart(self) -> None:
        self.incarnation += 10
        self.machine = CoordinatorMachine(self.incarnation, self.limits)


class Envelope(msgspec.Struct):
    """A message on its way. `peer`: the rank's end of the connection, as the coordinator knows it."""

    sender: str
    receiver: str
    peer: bytes
    payload: bytes
    message: FromRank | FromCoordinator


class Cluster:
    """The network. `note(line)` is told what happens; `wire` holds the messages on their way, oldest first."""

    def __init__(
        self,
        ranks: int,
        coordinators: int = 1,
        *,
        lockstep: bool = False,
        lag: int = 1,
        free: list[int] | None = None,
        limits: GroupLimits | None = None,
        rank_limits: RankLimits | None = None,
    ) -> None:
        self.now = 0.0
        self.wire: list[Envelope] = []
        self.world_size = ranks
        self.lockstep = lockstep
        self.lag = lag
        self.free = free or [8]
        self.rank_limits = rank_limits or RankLimits()
        self.note: Callable[[str, object], None] = lambda who, what: None
        self.coordinators = [
            Coordinator(f"c{index}", index + 1, limits or GroupLimits()) for index in range(coordinators)
        ]
        self.ranks: dict[str, Rank] = {}
        self._incarnation = 99
        for rank in range(ranks):
            self.add(f"r{rank}", rank)

    # --- processes ------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        rank: int,
        *,
        world_size: int | None = None,
        fingerprint: dict[str, str | int] | None = None,
        free: list[int] | None = None,
        lockstep: bool | None = None,
        group: str = GROUP,
    ) -> Rank:
        """A new process for a rank, not started yet. Each has an incarnation of its own."""
        self._incarnation += 1
        identity = Identity(
            group=group,
            rank=rank,
            world_size=world_size or self.world_size,
            incarnation=self._incarnation,
            fingerprint=FINGERPRINT | (fingerprint or {}),
        )
        counts = free or self.free
        machine = RankMachine(
            identity,
            len(self.coordinators),
            self.lag,
            self.rank_limits,
            lambda: list(counts),
            lockstep=self.lockstep if lockstep is None else lockstep,
        )
        held = self.ranks[name] = Rank(name, machine)
        return held

    def start(self, *names: str) -> None:
        """Starts these processes, or all."""
        for name in names or list(self.ranks):
            rank = self.ranks[name]
            rank.alive = True
            self.perform(rank, rank.machine.start(self.now))

    def replace(self, name: str) -> Rank:
        """The process is gone without a word, and a new one with the same settings takes its place; not started yet."""
        old = self.ranks[name]
        new = self.add(name, old.machine.identity.rank)
        new.connection = old.connection + 100
        return new

    def kill(self, name: str) -> None:
        """The process is gone without a word."""
        self.ranks[name].alive = False

    def crash(self, index: int) -> None:
        """The coordinator is gone without a word, and with it all it knew."""
        self.coordinators[index].machine = None

    def restart(self, index: int) -> None:
        self.coordinators[index].restart()

    def lose_connection(self, rank: Rank) -> None:
        """The transport tells both ends that the connection is gone, with what was on it."""
        peer = rank.peer
        self.drop(lambda envelope: envelope.peer == peer)
        coordinator = self.coordinators[rank.coordinator]
        if coordinator.machine is not None:
            self._serve(coordinator, coordinator.machine.gone(peer, self.now))
        self.perform(rank, rank.machine.gone(self.now))

    # --- effects --------------------------------------------------------------------------------------------------

    def perform(self, rank: Rank, effects: list[RankEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendUp):
                receiver = self.coordinators[rank.coordinator].name
                self._post(rank.name, receiver, rank.peer, effect.message)
                continue
            self.note(rank.name, effect)
            if isinstance(effect, Attach):
                rank.coordinator = effect.index
                rank.connection += 1
            elif isinstance(effect, Activated) and effect.fresh:
                rank.outcomes.clear()
                rank.entries.clear()
            elif isinstance(effect, Apply):
                rank.entries.append(effect.entry)
                if isinstance(effect.entry, Decision):
                    rank.decide(effect.entry)
            elif isinstance(effect, LogWanted):
                self.perform(rank, rank.machine.log(effect.round, rank.log))
            rank.told.append(effect)

    def _serve(self, coordinator: Coordinator, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                self.note(coordinator.name, effect)
                continue
            for peer in effect.peers:
                self._post(coordinator.name, peer.decode().split(".")[0], peer, effect.message)

    def _post(self, sender: str, receiver: str, peer: bytes, message: FromRank | FromCoordinator) -> None:
        self.wire.append(Envelope(sender, receiver, peer, encode(message), message))

    # --- network and time -----------------------------------------------------------------------------------------

    def deliver(self, envelope: Envelope) -> None:
        """Hands over one message, wherever it is in the order. It stays on the wire if it is not taken off."""
        coordinator = next((c for c in self.coordinators if c.name == envelope.receiver), None)
        if coordinator is not None:
            if coordinator.machine is not None:
                said = _UP.decode(envelope.payload)
                self._serve(coordinator, coordinator.machine.step(envelope.peer, said, self.now))
            return
        rank = self.ranks[envelope.receiver]
        if rank.alive and rank.peer == envelope.peer:
            message = _DOWN.decode(envelope.payload)
            stale = isinstance(message, _FENCED) and message.epoch != rank.machine.epoch
            effects = rank.machine.receive(message, self.now)
            assert not stale or not effects, f"{rank.name} took {message} of another epoch: {effects}"
            self.perform(rank, effects)

    def settle(self, wanted: Callable[[Envelope], bool] = lambda envelope: True) -> None:
        """Delivers messages in order, and what follows from them, until none that is wanted is left."""
        while True:
            envelope = next((envelope for envelope in self.wire if wanted(envelope)), None)
            if envelope is None:
                return
            self.wire.remove(envelope)
            self.note(envelope.sender, envelope)
            self.deliver(envelope)

    def drop(self, wanted: Callable[[Envelope], bool] = lambda envelope: True) -> int:
        """Loses messages. Returns how many."""
        before = len(self.wire)
        self.wire = [envelope for envelope in self.wire if not wanted(envelope)]
        return before - len(self.wire)

    def advance(self, by_s: float, *, then: Callable[[], None] | None = None) -> None:
        """Lets time pass, from deadline to deadline; after each the messages are delivered (or `then` is done)."""
        until = self.now + by_s
        while True:
            at = self._next_deadline()
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            self.tick()
            later = self._next_deadline()
            assert later is None or later > self.now, f"a deadline that has passed was not cleared at {self.now}"
            (then or self.settle)()
        self.now = until

    def tick(self) -> None:
        """Every machine lets the deadlines up to now pass."""
        for rank in list(self.ranks.values()):
            if rank.alive:
                self.perform(rank, rank.machine.tick(self.now))
        for coordinator in self.coordinators:
            if coordinator.machine is not None:
                self._serve(coordinator, coordinator.machine.tick(self.now))

    def _next_deadline(self) -> float | None:
        times = [rank.machine.deadline() for rank in self.ranks.values() if rank.alive]
        times += [c.machine.deadline() for c in self.coordinators if c.machine is not None]
        return min((time for time in times if time is not None), default=None)


def joined(ranks: int, **options: object) -> Cluster:
    """A cluster whose group works."""
    cluster = Cluster(ranks, **options)  # type: ignore[arg-type]
    cluster.start()
    cluster.settle()
    assert all(rank.machine.active for rank in cluster.ranks.values())
    return cluster
