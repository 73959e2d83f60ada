"""A simulated group whose engines do what a test says: all checkers look on, time passes when it is told to."""

from collections.abc import Callable, Sequence

import msgspec

from kvcoord.config.group import GroupConfig, PoolConfig
from kvcoord.config.limits import Limits
from kvcoord.domain import PageKey, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Advanced,
    Answer,
    Call,
    Failed,
    Release,
    WriteThrough,
    Written,
    join_keys,
)
from kvcoord.simulation.asked import Asked
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.shape import Shape
from kvcoord.simulation.world import World

SHAPES = [(tp, pp) for pp in (1, 2, 4) for tp in (1, 2, 4, 8)]
"""(tp, pp) of a sweep."""

ODD_RANKS = [
    (tp, pp, odd)
    for tp, pp in SHAPES
    for odd in range(tp * pp)
    if tp * pp <= 8 or odd in (0, tp * pp // 2, tp * pp - 1)
]
"""A sweep with the odd rank at each position; of groups with more than 8 ranks first, in the middle, and last."""

CORNERS = [(tp, pp, odd) for tp, pp, odd in ODD_RANKS if tp * pp <= 2 or odd in (0, tp * pp - 1)]
"""The same for sweeps that have further dimensions: the odd rank first and last."""


def hosts(ranks: int, usual: int, odd: int, of_odd: int) -> list[int]:
    """Host pages by rank, other ones on the odd rank."""
    return [of_odd if rank == odd else usual for rank in range(ranks)]


def pages(*blocks: int) -> list[PageKey]:
    return block_page_keys(blocks)


class ScriptedEngine:
    """Keeps every answer by the number of its call."""

    def __init__(self, world: World, rank: SimulatedRank) -> None:
        self.session = 1 + rank.number
        self.asked: dict[int, Asked] = {}
        self.answers: dict[int, Answer] = {}
        self.done = False
        self.paused = False
        self.history = 0
        self.step = 0
        self.index = 0
        self._world = world
        self._rank = rank

    def connected(self) -> None:
        self._rank.register()

    def disconnected(self) -> None:
        self.asked.clear()

    def restart(self) -> None:
        """The engine's process ends, and the next one registers at once."""
        self._rank.engine_gone(self.session)
        self.session += 100
        self.asked.clear()
        self.step = 0
        self._rank.register()

    def resume(self) -> None:
        self.paused = False

    def poll(self, call: Call) -> int:
        """Asks what the other ranks do not ask at this point of their step."""
        return self._ask(call, -1)

    def ask(self, call: Call) -> int:
        self.index += 1
        return self._ask(call, self.index)

    def _ask(self, call: Call, index: int) -> int:
        number = self._world.new_call()
        self.asked[number] = Asked(call, index, self._world.agenda.now, lambda answer: None)
        self._rank.call(self.session, [(number, call)])
        return number

    def hear(self, answers: list[tuple[int, Answer]]) -> None:
        for number, answer in answers:
            asked = self.asked.pop(number, None)
            if asked is None:
                continue
            self.answers[number] = answer
            if isinstance(answer, Failed):
                continue
            step = self.step if self._world.shape.group.lockstep and asked.index > 0 else -1
            where = (self._rank.machine.history, step, asked.index)
            self._world.promises.answered(self._rank, where, asked.call, answer)


class Script:
    """The group. Calls go to all ranks, or to one; `seconds` pass meanwhile."""

    def __init__(
        self,
        tp: int = 2,
        pp: int = 1,
        *,
        device: int = 32,
        host: Sequence[int] | int = 16,
        lockstep: bool = True,
        coordinators: int = 1,
        pools: Sequence[str] = ("kv",),
        model: str = "",
        joined: bool = True,
        seed: int = 1,
        **limits: int,
    ) -> None:
        ranks = tp * pp
        hosts = (host,) * ranks if isinstance(host, int) else tuple(host)
        group = GroupConfig(
            name="sim",
            tp=tp,
            pp=pp,
            lockstep=lockstep,
            pools=[PoolConfig(name=name, page_bytes=64, layers=1) for name in pools],
        )
        shape = Shape(
            group=group,
            coordinators=coordinators,
            device_pages=device,
            host_pages=hosts,
            limits=msgspec.convert(limits, Limits),
            model=model,
        )
        self.world = World(shape, seed, [], 1e9)
        self.world.failures_allowed |= {"GroupRenewed", "UsageError"}
        self.world.faultless = False
        self.engines = [ScriptedEngine(self.world, rank) for rank in self.world.ranks]
        for rank, engine in zip(self.world.ranks, self.engines, strict=True):
            rank.engine = engine
        self.step = 0
        if joined:
            self.pass_time(1.0)
            assert self.joined()

    def joined(self) -> bool:
        """Whether the group works on every rank."""
        return all(rank.alive and rank.machine.active for rank in self.ranks)

    @property
    def ranks(self) -> list[SimulatedRank]:
        return self.world.ranks

    @property
    def everyone(self) -> range:
        return range(len(self.ranks))

    def pass_time(self, seconds: float) -> None:
        self.world.run_until(self.world.agenda.now + seconds)

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Lets time pass until this is so. It has to come about within so many seconds."""
        until = self.world.agenda.now + seconds
        while not condition():
            assert self.world.agenda.now < until, "it did not come about"
            self.world.agenda.step()

    def ask(self, call: Call, ranks: Sequence[int] | None = None) -> list[int]:
        return [self.engines[rank].ask(call) for rank in (self.everyone if ranks is None else ranks)]

    def answers(self, numbers: Sequence[int], seconds: float = 60.0) -> list[Answer]:
        """The answers to one call on all ranks, once they are there."""
        pairs = list(zip(self.engines, numbers, strict=True))
        self.wait(lambda: all(number in engine.answers for engine, number in pairs), seconds)
        return [engine.answers[number] for engine, number in pairs]

    def call(self, call: Call) -> list[Answer]:
        return self.answers(self.ask(call))

    def advance(self) -> Advanced:
        """One step on all ranks."""
        first, *others = self.call(Advance(self.step))
        assert isinstance(first, Advanced), first
        assert all(other == first for other in others)
        self.step += 1
        for engine in self.engines:
            engine.step, engine.index = self.step, 0
        return first

    def settle(self, steps_max: int = 60) -> list[Advanced]:
        """Steps until nothing is open and the agreed capacity shows it."""
        told = [self.advance()]
        while told[-1].operations_open:
            assert len(told) < steps_max
            told.append(self.advance())
            self.pass_time(0.02)
        return told + [self.advance() for _ in range(self.world.shape.group.lag + 1)]

    def acquire(self, keys: list[PageKey]) -> list[Acquired]:
        """A lease on all ranks, with what is new filled. All take the same way."""
        answers = self.call(Acquire(join_keys(keys)))
        leases = [answer for answer in answers if isinstance(answer, Acquired)]
        assert len(leases) == len(self.ranks), answers
        assert len({(lease.lease, str(lease.outcome)) for lease in leases}) == 1
        for rank, lease in zip(self.ranks, leases, strict=True):
            if lease.outcome:
                cached = lease.device_pages + lease.host_pages
                rank.memory.fill(Tier.DEVICE, [slots[cached:] for slots in lease.slots], keys[cached:])
        return leases

    def write(self, lease: int) -> list[Written]:
        """Publishes a lease's pages, and releases it."""
        written = self.call(WriteThrough(lease=lease, deferred=True))
        self.call(Release(lease))
        return [answer for answer in written if isinstance(answer, Written)]

    def cache(self, keys: list[PageKey]) -> list[Advanced]:
        """These pages, from nothing to published on both tiers."""
        self.write(self.acquire(keys)[0].lease)
        return self.settle()

    def hold_copies(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].copy_weather.stuck += 1

    def release_copies(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].copy_weather.stuck -= 1
            self.ranks[rank].release_held()

    def resident(self, rank: int, keys: list[PageKey], tier: Tier) -> int:
        tree = self.ranks[rank].worker.cache.state.tree
        return sum(count for _, count in tree.resident(keys, tier))

    def close(self) -> None:
        """Ends a group that is not at rest."""
        for rank in self.ranks:
            if rank.alive:
                rank.crash()

    def check_rest(self) -> None:
        """Once nothing is open: nothing leaked, all ranks have the same."""
        self.world.promises.finish()
        states = [rank.worker.cache.state for rank in self.ranks]
        assert len({state.digest.chain for state in states}) == 1
        assert len({state.tree.digest for state in states}) == 1
