"""Some workers and their coordinator in one thread: the production machines, messages in order, copies on command."""

from collections import deque

import msgspec

from kvcoord.config.group import GroupConfig
from kvcoord.config.limits import Limits
from kvcoord.config.process import WorkerConfig
from kvcoord.controller.assembly import make_worker
from kvcoord.controller.effects import MapHosts, Reply, StartCopy
from kvcoord.controller.worker import WorkerEffect, WorkerMachine
from kvcoord.domain import PageKey, Reason
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import Attach, CoordinatorEffect, Send, SendUp
from kvcoord.protocol.group import GroupLimits
from kvcoord.protocol.local import Acquire, Acquired, Advance, Advanced, Answer, Call, Release, WriteThrough, join_keys
from kvcoord.protocol.messages import FromCoordinator, FromRank

SESSION = 1


class Cluster:
    """Ranks, a coordinator, and one engine for each rank. Copies of the ranks in `held` do not end by themselves.

    `pools_by_rank` are the pools as each rank has them, one KV cache for all when left out.
    """

    def __init__(self, ranks: int, device: int, host: int | list[int], **group: object) -> None:
        hosts = host if isinstance(host, list) else [host] * ranks
        pools = [{"name": "kv", "page_bytes": 64, "layers": 1}]
        by_rank = msgspec.convert(group.pop("pools_by_rank", [pools] * ranks), list)
        limits = msgspec.convert(group.pop("limits", {}), Limits)
        groups = [msgspec.convert({"world_size": ranks, "pools": own, **group}, GroupConfig) for own in by_rank]
        self.lag = groups[0].lag
        self.now = 0.0
        self.coordinator = CoordinatorMachine(1, GroupLimits())
        self.configs = [
            WorkerConfig(group=groups[rank], rank=rank, device_pages=device, host_pages=hosts[rank], limits=limits)
            for rank in range(ranks)
        ]
        self.workers: list[WorkerMachine] = [make_worker(self.configs[rank], rank + 7) for rank in range(ranks)]
        self.answers: list[dict[int, Answer]] = [{} for _ in range(ranks)]
        self.copies: list[deque[StartCopy]] = [deque() for _ in range(ranks)]
        self.held: set[int] = set()
        self.step = 0
        self._number = 0
        self._up: deque[tuple[int, FromRank]] = deque()
        self._down: deque[tuple[int, FromCoordinator]] = deque()
        for rank, worker in enumerate(self.workers):
            self._perform(rank, worker.start(self.now))
        self.run()

    def run(self) -> None:
        """Delivers messages and ends copies until nothing moves."""
        while self._deliver() or self._end_copies():
            pass

    def ask(self, *calls: Call) -> list[list[Answer]]:
        """The engines of all ranks make these calls. Returns each rank's answers, in the order of the calls.

        A call that waits for copies of its own rank lets the held ones end.
        """
        numbers = []
        for call in calls:
            self._number += 1
            numbers.append(self._number)
            for rank, worker in enumerate(self.workers):
                self._perform(rank, worker.call(SESSION, self._number, call, self.now))
        self.run()
        for rank, answers in enumerate(self.answers):
            while any(number not in answers for number in numbers):
                assert self.copies[rank], "a call is held up by nothing but copies"
                self.copy_ended(rank)
                self.run()
        return [[self.answers[rank][number] for number in numbers] for rank in range(len(self.workers))]

    def begin_on_all(self, call: Call) -> list[Answer]:
        """A call that held copies do not hold up. Each rank's answer."""
        numbers = [self.begin(rank, call) for rank in range(len(self.workers))]
        self.run()
        return [self.answers[rank][number] for rank, number in enumerate(numbers)]

    def begin(self, rank: int, call: Call) -> int:
        """One rank's engine makes a call. Returns its number in `answers`; delivers nothing yet."""
        self._number += 1
        self._perform(rank, self.workers[rank].call(SESSION, self._number, call, self.now))
        return self._number

    def restart(self, rank: int) -> None:
        """A rank's worker dies and comes back with nothing, and says so through a connection of its own."""
        for effect in self.coordinator.gone(str(rank).encode(), self.now):
            self._send_down(effect)
        config = self.configs[rank]
        self.workers[rank] = make_worker(config, self.workers[rank].rank.identity.incarnation + 100)  # type: ignore[union-attr]
        self.copies[rank].clear()
        self._perform(rank, self.workers[rank].start(self.now))

    def pass_time(self, by_s: float) -> None:
        """Lets time pass on all machines, and delivers what follows from it."""
        self.now += by_s
        for effect in self.coordinator.tick(self.now):
            self._send_down(effect)
        for rank, worker in enumerate(self.workers):
            self._perform(rank, worker.tick(self.now))
        self.run()

    def advance(self) -> Advanced:
        """One step on all ranks; all must say the same."""
        answers = self.ask(Advance(self.step))
        self.step += 1
        first = answers[0][0]
        assert isinstance(first, Advanced)
        assert all(answer == answers[0] for answer in answers)
        return first

    def settle(self) -> None:
        """Steps until everything has ended on all ranks, and the agreed capacity shows it."""
        while self.advance().operations_open:
            pass
        for _ in range(self.lag + 1):
            self.advance()

    def serve(self, keys: list[PageKey]) -> tuple[int, int]:
        """One request from beginning to end: hits on device and on host."""
        self.settle()
        acquired = self.ask(Acquire(join_keys(keys)))
        hits = {(answer.device_pages, answer.host_pages) for (answer,) in acquired if isinstance(answer, Acquired)}
        assert len(hits) == 1
        lease = acquired[0][0]
        assert isinstance(lease, Acquired)
        if lease.outcome:
            self.ask(WriteThrough(lease=lease.lease, deferred=True), Release(lease.lease))
        self.settle()
        return hits.pop()

    def check(self) -> None:
        """Nothing leaked, and all ranks have the same."""
        states = [worker.cache.state for worker in self.workers]
        assert len({state.digest.chain for state in states}) == 1
        assert len({state.tree.digest for state in states}) == 1
        for state in states:
            state.tree.check()
            for pool in (*state.pools.device, *state.pools.host):
                pool.check()
                assert pool.reserved_count == pool.quarantined_count == 0

    def copy_ended(self, rank: int, error: Reason | None = None) -> None:
        """The oldest copy of a held rank ends."""
        copy = self.copies[rank].popleft()
        self._perform(rank, self.workers[rank].copy_ended(copy.operation, error, self.now))

    def _deliver(self) -> bool:
        moved = False
        while self._up or self._down:
            moved = True
            if self._up:
                rank, message = self._up.popleft()
                for effect in self.coordinator.step(str(rank).encode(), message, self.now):
                    self._send_down(effect)
            else:
                rank, down = self._down.popleft()
                self._perform(rank, self.workers[rank].receive(down, self.now))
        return moved

    def _send_down(self, effect: CoordinatorEffect) -> None:
        if isinstance(effect, Send):
            self._down += [(int(peer), effect.message) for peer in effect.peers]

    def _end_copies(self) -> bool:
        moved = False
        for rank in range(len(self.workers)):
            while self.copies[rank] and rank not in self.held:
                moved = True
                self.copy_ended(rank)
        return moved

    def _perform(self, rank: int, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                assert effect.call not in self.answers[rank], "a call is answered once"
                self.answers[rank][effect.call] = effect.answer
            elif isinstance(effect, StartCopy):
                self.copies[rank].append(effect)
            elif isinstance(effect, MapHosts):
                self._perform(rank, self.workers[rank].hosts_mapped(effect.history, self.now))
            elif isinstance(effect, SendUp):
                self._up.append((rank, effect.message))
            else:
                assert isinstance(effect, Attach | msgspec.Struct)
