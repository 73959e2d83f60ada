"""The engine of one rank in lockstep: a scheduler that runs the group's program step by step.

Everything it does follows from the program and from answers that must be equal on all ranks. It reads the bytes of
every page that it holds at every step, and fills what it has to compute.
"""

import random
from functools import partial
from typing import Final

from kvcoord.domain import PageKey, Reason, Tier
from kvcoord.protocol.local import (
    NO_SLOT,
    Acquire,
    Acquired,
    Advance,
    Advanced,
    Agree,
    Allocate,
    Allocated,
    Answer,
    Call,
    Evict,
    Failed,
    Free,
    Release,
    WriteThrough,
    join_keys,
)
from kvcoord.simulation.asked import Asked, Heard
from kvcoord.simulation.program import AcquireWanted, agreed_value
from kvcoord.simulation.rank import SimulatedRank
from kvcoord.simulation.surroundings import Surroundings

IDLE_S: Final = 0.2
"""How often an engine steps that has nothing more to do."""

RESTART_S: Final = 0.5
"""How long a failed process is down before somebody starts it again."""


class Held:
    """A lease that this engine reads, until step `until`."""

    __slots__ = ("keys", "number", "slots", "until", "wanted")

    def __init__(self, number: int, keys: list[PageKey], slots: list[list[int]], until: int, wanted: AcquireWanted):
        self.number, self.keys, self.slots, self.until, self.wanted = number, keys, slots, until, wanted


class LockstepEngine:
    """One rank's engine. `done`: it has drained and only keeps stepping."""

    def __init__(self, world: Surroundings, rank: SimulatedRank) -> None:
        self.session = 0
        self.step = 0
        self.done = False
        self.history = 0
        self.asked: dict[int, Asked] = {}
        self.paused = False
        self._world = world
        self._rank = rank
        self._random = random.Random(f"{world.seed}/engine/{rank.number}")
        self._held: list[Held] = []
        self._drained_steps = 0
        self._index = 0
        self._waiting_to_step = False
        self._overslept = False
        """A step was due in a pause."""
        stage = rank.number // world.shape.group.tp
        self._skew_s = stage * world.shape.think_s

    # --- life -----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The worker can be reached: begins a life at step 0."""
        self._begin()

    def disconnected(self) -> None:
        """The worker is gone: nothing that was asked will be answered."""
        self._drop()

    def restart(self) -> None:
        """The engine's process ends, and another one starts in its place."""
        self._rank.engine_gone(self.session)
        self._drop()
        self._world.agenda.after(self._random.uniform(0.01, 1.0), partial(self._begin_if, self.session))

    def _begin_if(self, session: int) -> None:
        if session == self.session and self._rank.alive:
            self._begin()

    def _begin(self) -> None:
        self._drop()
        self._rank.register()
        self._waiting_to_step = True
        self._world.agenda.after(self._skew_s + self._random.random() * 0.05, partial(self._next_step, self.session))

    def _drop(self) -> None:
        self.session = self._world.new_session()
        self.step = 0
        self.done = False
        self.history = 0
        self._drained_steps = 0
        self.asked.clear()
        self._held.clear()
        self._waiting_to_step = False
        self._overslept = False

    def resume(self) -> None:
        """Goes on after a pause."""
        self.paused = False
        if self._overslept:
            self._overslept = False
            self._next_step(self.session)

    # --- a step ---------------------------------------------------------------------------------------------------

    def _next_step(self, session: int) -> None:
        if session != self.session:
            return
        if self.paused:
            self._overslept = True
            return
        self._waiting_to_step = False
        self._index = 0
        calls: list[tuple[int, Call]] = []
        draining = self._world.drain_from is not None and self.step >= self._world.drain_from
        self._hand_in(calls, everything=draining)
        self._ask(calls, Advance(self.step), self._advanced)
        if not draining:
            self._ask_plan(calls)
        self._rank.call(self.session, calls)

    def _ask(self, calls: list[tuple[int, Call]], call: Call, heard: Heard) -> None:
        number = self._world.new_call()
        self.asked[number] = Asked(call, self._index, self._world.agenda.now, heard)
        self._index += 1
        calls.append((number, call))

    def _hand_in(self, calls: list[tuple[int, Call]], *, everything: bool) -> None:
        """Publishes what was computed, and releases the leases whose time is over."""
        kept = []
        for held in self._held:
            if held.until > self.step and not everything:
                kept.append(held)
                continue
            if held.wanted.published:
                self._ask(calls, WriteThrough(lease=held.number, deferred=held.wanted.deferred), self._nothing)
            self._ask(calls, Release(held.number), self._nothing)
        self._held = kept

    def _ask_plan(self, calls: list[tuple[int, Call]]) -> None:
        plan = self._world.program.step(self.step)
        for wanted in plan.acquires:
            self._ask(calls, Acquire(join_keys(wanted.keys), wanted.landed), partial(self._acquired, wanted))
        if plan.agree is not None:
            agree = plan.agree
            yes = agree.no_by != self._rank.number
            value = agreed_value(agree.agreement, self._rank.number) if yes else None
            reason = None if yes else Reason.BUSY
            call = Agree(agree.operation, yes, agree.agreement, agree.participants, value, reason, {}, agree.deferred)
            self._ask(calls, call, self._nothing)
        if plan.evict_host:
            self._ask(calls, Evict(Tier.HOST, plan.evict_host), self._nothing)
        if plan.spare:
            self._ask(calls, Allocate(plan.spare), self._allocated)

    def hear(self, answers: list[tuple[int, Answer]]) -> None:
        """Answers in the order in which they became known."""
        for number, answer in answers:
            asked = self.asked.pop(number, None)
            if asked is None:
                continue
            if isinstance(answer, Failed):
                self._world.promises.failed(self._rank, asked.call, answer)
                self._failed(answer)
                return
            history = self.history or self._rank.machine.history
            self._world.promises.answered(self._rank, (history, self.step, asked.index), asked.call, answer)
            asked.heard(answer)
        if not self.asked and not self._waiting_to_step:
            self._compute()

    def _failed(self, failure: Failed) -> None:
        """Nothing that this engine holds is good any more."""
        if failure.error == "GroupRenewed":
            self._begin()
            return
        self._drop()
        self._world.supervise(self._rank)

    # --- answers --------------------------------------------------------------------------------------------------

    def _nothing(self, _: Answer) -> None:
        pass

    def _advanced(self, answer: Answer) -> None:
        assert isinstance(answer, Advanced)
        for held in self._held:
            if held.number in answer.broken:
                held.keys = []
        if not self.history:
            self.history = self._rank.machine.history
        drain_from = self._world.drain_from
        if drain_from is None or self.step <= drain_from or answer.operations_open or self._held:
            self._drained_steps = 0
            self.done = False
            return
        self._drained_steps += 1
        self.done = self._drained_steps > self._world.shape.group.lag + 1

    def _allocated(self, answer: Answer) -> None:
        assert isinstance(answer, Allocated)
        if answer.outcome:
            calls: list[tuple[int, Call]] = []
            self._ask(calls, Free(answer.slots), self._nothing)
            self._rank.call(self.session, calls)

    def _acquired(self, wanted: AcquireWanted, answer: Answer) -> None:
        assert isinstance(answer, Acquired)
        if not answer.outcome:
            return
        self._check_slots(answer)
        self._check_ends(answer, len(wanted.keys))
        held = Held(answer.lease, wanted.keys, answer.slots, self.step + wanted.steps, wanted)
        self._held.append(held)
        self._held.sort(key=lambda held: held.number)
        cached = answer.device_pages + answer.host_pages
        if answer.error or not wanted.landed:
            held.keys = wanted.keys[: answer.device_pages]
        if wanted.landed:
            self._read(held, cached if not answer.error else answer.device_pages)
        else:
            self._read(held, 0)
        new = [slots[cached:] for slots in answer.slots]
        self._rank.memory.fill(Tier.DEVICE, new, wanted.keys[cached:])

    def _check_slots(self, answer: Acquired) -> None:
        """What this lease has to fill is read under no other lease, not even a broken one."""
        cached = answer.device_pages + answer.host_pages
        for number, slots in enumerate(answer.slots):
            filled = set(slots[cached:])
            if number == 0:
                filled.update(slot for first, count in answer.loaded for slot in slots[first : first + count])
            for held in self._held:
                shared = filled.intersection(held.slots[number]) - {NO_SLOT}
                if shared and held.number < answer.lease:
                    wrong = f"device slots {sorted(shared)} are handed out again to lease {answer.lease}"
                    self._world.promises.read(self._rank, held.number, wrong)

    def _check_ends(self, answer: Acquired, pages: int) -> None:
        """It can go on from what is cached, and has somewhere to leave what the next request goes on from."""
        cached = answer.device_pages + answer.host_pages
        for pool, slots in zip(self._world.shape.group.pools, answer.slots, strict=True):
            window = pool.tail_pages or pages
            needed = {*range(max(0, cached - window), cached), *range(max(cached, pages - window), pages)}
            if {at for at, slot in enumerate(slots) if slot != NO_SLOT} != needed:
                wrong = f"pool {pool.name} has slots {slots} for {cached} cached pages of {pages}"
                self._world.promises.read(self._rank, answer.lease, wrong)

    def _read(self, held: Held, pages: int) -> None:
        wrong = self._rank.memory.wrong(Tier.DEVICE, [slots[:pages] for slots in held.slots], held.keys[:pages])
        self._world.promises.read(self._rank, held.number, wrong)

    # --- the forward pass -----------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Reads all that is held, then begins the next step."""
        for held in self._held:
            self._read(held, len(held.keys))
        self.step += 1
        seconds = IDLE_S if self.done else self._world.shape.think_s * self._random.uniform(0.2, 1.8)
        self._waiting_to_step = True
        self._world.agenda.after(seconds, partial(self._next_step, self.session))
