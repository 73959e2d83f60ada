"""One address of a coordinator, and the life that answers there: the production machine behind a simulated socket."""

from kvcoord.protocol.codec import encode, rank_decoder
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import CoordinatorEffect, Note
from kvcoord.protocol.messages import Activate
from kvcoord.simulation.network import Envelope, Way
from kvcoord.simulation.process import Process, SkewedClock
from kvcoord.simulation.surroundings import Surroundings

_DECODER = rank_decoder()


class SimulatedCoordinator(Process):
    """Loses everything when it is killed. Each life has an incarnation of its own."""

    def __init__(self, world: Surroundings, index: int, clock: SkewedClock) -> None:
        super().__init__(f"coordinator {index}", world.agenda, clock)
        self.index = index
        self.machine: CoordinatorMachine | None = None
        self._world = world

    def boot(self) -> None:
        """A new process at this address."""
        self.born()
        self._world.incarnations += 1
        self.machine = CoordinatorMachine(self._world.incarnations, self._world.shape.group_limits())

    def crash(self) -> None:
        self.killed()
        self.machine = None
        self._world.lost_coordinator(self.index)

    def receive(self, envelope: Envelope) -> None:
        """One message of a rank."""
        self.take(lambda: self._step(envelope))

    def gone(self, peer: bytes) -> None:
        """The transport notices that nobody is there any more."""
        self.take(lambda: self._perform(self._living().gone(peer, self.now())))

    def tick(self) -> None:
        self._perform(self._living().tick(self.now()))

    def _step(self, envelope: Envelope) -> None:
        machine, promises = self._living(), self._world.promises
        message = _DECODER.decode(envelope.payload)
        before = promises.before_coordinator(self, message)
        effects = machine.step(envelope.peer, message, self.now())
        promises.after_message_up(self, message, before, effects)
        self._perform(effects)

    def _perform(self, effects: list[CoordinatorEffect]) -> None:
        world = self._world
        for effect in effects:
            if isinstance(effect, Note):
                world.story.note(self.name, effect)
                continue
            message = effect.message
            if isinstance(message, Activate):
                world.activations.add((message.epoch, self.index))
            payload = encode(message)
            for peer in effect.peers:
                rank = int(peer.split(b"/", 1)[0])
                world.network.send(Envelope(Way.DOWN, rank, self.index, peer, payload, message))
        self.set_alarm(self._living().deadline())
        world.promises.after_coordinator(self)

    def _living(self) -> CoordinatorMachine:
        assert self.machine is not None
        return self.machine
