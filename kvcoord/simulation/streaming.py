"""The engine of one rank without lockstep: it comes to the group's operations in its own order and at its own pace.

Operations arrive at all engines at about the same time, as requests do. One that is late with them gives up the oldest.
It owns its device slots, and gives one back only when the worker has answered and no copy touches it any more.
"""

import random
from functools import partial

from kvcoord.domain import Agreement, OperationId, PageKey, Tier
from kvcoord.protocol.local import (
    Agree,
    Agreed,
    Answer,
    Call,
    Failed,
    LoadBack,
    Loaded,
    WriteThrough,
    Written,
    join_keys,
)
from kvcoord.simulation.asked import Asked, Heard
from kvcoord.simulation.lockstep import IDLE_S
from kvcoord.simulation.program import PROMPTS, agreed_value
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.surroundings import Surroundings

OPEN_MAX = 4
"""Calls that one engine has open at once."""

DISORDER = 3.0
"""How many operations an engine may be late with one of them, by its own choice."""


class StreamingEngine:
    """One rank's engine. `done`: it has come to every operation of the group, and nothing is open."""

    def __init__(self, world: Surroundings, rank: SimulatedRank) -> None:
        self.session = 0
        self.done = False
        self.history = 0
        self.asked: dict[int, Asked] = {}
        self.paused = False
        self.step = 0
        self._world = world
        self._rank = rank
        self._random = random.Random(f"{world.seed}/engine/{rank.number}")
        self._free: list[int] = []
        self._leaving: list[tuple[OperationId, list[int]]] = []
        """Slots to be given back when the copy of this operation is over."""
        self._next: list[tuple[float, int]] = []

    # --- life -----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        self._begin()

    def disconnected(self) -> None:
        self._drop()

    def restart(self) -> None:
        """The engine's process ends, and another one starts in its place."""
        self._rank.engine_gone(self.session)
        self._drop()
        self._world.agenda.after(self._random.uniform(0.01, 1.0), partial(self._begin_if, self.session))

    def resume(self) -> None:
        self.paused = False

    def _begin_if(self, session: int) -> None:
        if session == self.session and self._rank.alive:
            self._begin()

    def _begin(self) -> None:
        self._drop()
        self.step = self._arrived()
        self._rank.register()
        self._world.agenda.after(self._random.random() * 0.05, partial(self._move, self.session))

    def _drop(self) -> None:
        self.session = self._world.new_session()
        self.step = 0
        self.done = False
        self.history = 0
        self.asked.clear()
        self._leaving.clear()
        self._next.clear()
        self._free = list(range(self._world.shape.device_pages))

    # --- operations -----------------------------------------------------------------------------------------------

    def _move(self, session: int) -> None:
        """Puts the next operation if there is one and few enough are open."""
        if session != self.session:
            return
        if not self.paused:
            self._give_back()
            if len(self.asked) < OPEN_MAX and not self._put():
                drained = not self.asked and not self._leaving and not self._rank.worker.cache.open_count()
                self.done = drained and self._world.drain_from is not None
        seconds = IDLE_S if self.done else self._world.shape.think_s * self._random.uniform(0.2, 1.8)
        self._world.agenda.after(seconds, partial(self._move, session))

    def _put(self) -> bool:
        """Puts the next operation if its time has come. Whether there are any more."""
        drain_from, arrived = self._world.drain_from, self._arrived()
        last = arrived if drain_from is None else min(arrived, drain_from - 1)
        for number in range(self.step, last + 1):
            self._next.append((number + self._random.random() * DISORDER, number))
        self.step = max(self.step, last + 1)
        too_old = arrived - self._world.shape.timeouts.vote_timeout_s / self._world.shape.think_s
        self._next = sorted(held for held in self._next if held[1] >= too_old)
        if not self._next or self._next[0][0] > arrived:
            return bool(self._next)
        self._operation(self._next.pop(0)[1])
        return True

    def _arrived(self) -> int:
        """The last operation that has come to the group so far."""
        return int(self._world.agenda.now / self._world.shape.think_s)

    def _operation(self, number: int) -> None:
        """The same on every rank, except that one of them may never come to it."""
        rng = random.Random(f"{self._world.seed}/operation/{number}")
        path = rng.choice(PROMPTS)
        keys = path[: rng.randint(1, len(path))]
        dice, skipped_by = rng.random(), rng.randrange(self._world.shape.ranks)
        if rng.random() < 0.04 and skipped_by == self._rank.number:
            return
        if dice < 0.1:
            self._agree(rng, f"a{number}")
            return
        count = rng.randint(1, len(keys))
        if count > len(self._free):
            return
        taken, self._free = self._free[:count], self._free[count:]
        slots = [taken for _ in self._world.shape.group.pools]
        if dice < 0.6:
            first = 0 if rng.random() < 0.8 else len(keys) - count
            keys = keys[first : first + count] if first == 0 else keys
            self._rank.memory.fill(Tier.DEVICE, slots, keys[len(keys) - count :])
            call: Call = WriteThrough(keys=join_keys(keys), slots=slots, operation=f"w{number}")
            self._ask(call, partial(self._written, taken))
        else:
            call = LoadBack(join_keys(keys), slots, f"l{number}", landed=True)
            self._ask(call, partial(self._loaded, taken, keys[len(keys) - count :]))

    def _agree(self, rng: random.Random, name: OperationId) -> None:
        agreement = rng.choice(list(Agreement))
        call = Agree(name, True, agreement, 0, agreed_value(agreement, self._rank.number))
        self._ask(call, self._nothing)

    def _ask(self, call: Call, heard: Heard) -> None:
        number = self._world.new_call()
        self.asked[number] = Asked(call, number, self._world.agenda.now, heard)
        self._rank.call(self.session, [(number, call)])

    # --- answers --------------------------------------------------------------------------------------------------

    def hear(self, answers: list[tuple[int, Answer]]) -> None:
        for number, answer in answers:
            asked = self.asked.pop(number, None)
            if asked is None:
                continue
            if isinstance(answer, Failed):
                self._world.promises.failed(self._rank, asked.call, answer)
                if answer.error == "GroupRenewed":
                    self._begin()
                else:
                    self._drop()
                    self._world.supervise(self._rank)
                return
            if not self.history:
                self.history = self._rank.machine.history
            self._world.promises.answered(self._rank, (self.history, -1, -1), asked.call, answer)
            asked.heard(answer)

    def _nothing(self, answer: Answer) -> None:
        assert isinstance(answer, Agreed)

    def _written(self, taken: list[int], answer: Answer) -> None:
        assert isinstance(answer, Written)
        self._leaving.append((answer.operation, taken))

    def _loaded(self, taken: list[int], keys: list[PageKey], answer: Answer) -> None:
        assert isinstance(answer, Loaded)
        self._leaving.append((answer.operation, taken))
        if answer.outcome and not answer.error:
            held = [taken[: answer.pages] for _ in self._world.shape.group.pools]
            wrong = self._rank.memory.wrong(Tier.DEVICE, held, keys[: answer.pages])
            self._world.promises.read(self._rank, answer.operation, wrong)

    def _give_back(self) -> None:
        kept = []
        for operation, slots in self._leaving:
            if operation in self._rank.copies:
                kept.append((operation, slots))
            else:
                self._free += slots
        self._leaving = kept
