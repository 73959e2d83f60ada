"""What differs from rank to rank, by the choice of one rank: slots of its pools that something else holds for a while.

The host pool's noise asks nobody. The device pool's takes only what its rank has more than the poorest one, and says a
frame ahead what it will take: SGLang's scheduler allocates from that pool at once, and cannot be told later.
"""

import random
from collections import deque
from typing import Any

import torch

from kvcoord.integrations.sglang.capacity import KV
from tests.sglang.engine import Engine, is_agreed


class HostNoise:
    """Holds up to `slots_max` host slots. Told to keep promises, it leaves alone what the group counts on."""

    def __init__(
        self, engine: Engine, rng: random.Random, slots_max: int, name: str = KV, *, keeps_promises: bool = False
    ) -> None:
        self._rng, self._slots_max = rng, slots_max
        self._pool = engine.host_pools()[name]
        self._held: list[Any] = []
        self._promises = Promises(engine.cache.agreement, name) if keeps_promises and is_agreed(engine) else None

    def tick(self) -> None:
        pool = self._pool
        if self._held and self._rng.random() < 0.3:
            pool.free(self._held.pop(self._rng.randrange(len(self._held))))
        if self._rng.random() < 0.3:
            page = self._pool.page_size
            room = self._slots_max - sum(len(slots) for slots in self._held)
            if self._promises is not None:
                room = min(room, pool.available_size() - self._promises.host())
            count = self._rng.randint(0, max(0, room)) // page * page
            slots = pool.alloc(count) if count else None
            if slots is not None:
                self._held.append(slots)

    def end(self) -> None:
        while self._held:
            self._pool.free(self._held.pop())


class Promises:
    """The slots of one rank's host pool that the group counts on, or may count on when it has heard its frames."""

    def __init__(self, agreement: Any, pool: str) -> None:
        self._capacity = agreement.capacity
        self._pool = pool
        self._at = self._capacity._at[pool]
        self._frames: deque[int] = deque(maxlen=agreement.rounds.lag + 1)
        """Free slots of the last frames, plus what was issued until then."""
        count = self._capacity.count

        def counted(step: int) -> Any:
            free = count(step)
            self._frames.append(free[self._at] + self._issued())
            return free

        self._capacity.count = counted

    def host(self) -> int:
        counted = [frame - self._issued() for frame in self._frames]
        return max(int(self._capacity.host_available(self._pool)), *counted, 0)

    def _issued(self) -> int:
        return int(self._capacity.ledger._net[self._at])


class DeviceNoise:
    """Holds up to `slots_max` device slots: planned at a frame, taken or given back when its verdict is applied.

    The engine of this rank has that many more than the poorest one.
    """

    def __init__(self, engine: Engine, rng: random.Random, slots_max: int, pool: str = KV) -> None:
        self._engine, self._rng, self._slots_max = engine, rng, slots_max
        self._pool = pool
        self._allocator = engine.device_allocators()[pool]
        self._held: list[Any] = []
        self._plans: deque[tuple[int, int]] = deque()
        self._planned = 0
        self._ended = False
        if is_agreed(engine):
            self._attach(engine.cache.agreement.capacity)

    def _attach(self, capacity: Any) -> None:
        count, settle, at = capacity.count, capacity.settle, list(capacity.device_free).index(self._pool)

        def counted(step: int) -> Any:
            plan = self._plan()
            self._plans.append((step, plan))
            self._planned += plan
            free = count(step)
            free[at] -= self._planned
            return free

        def settled(verdict: Any) -> None:
            while self._plans and self._plans[0][0] <= verdict.round:
                _, plan = self._plans.popleft()
                self._planned -= plan
                self._change(plan)
            settle(verdict)

        capacity.count, capacity.settle = counted, settled

    def tick(self) -> None:
        """Without kvcoord nobody is told."""
        if not is_agreed(self._engine):
            self._change(self._plan())

    def end(self) -> None:
        """Gives everything back: at once without kvcoord, else with the next steps."""
        self._ended = True
        self.tick()

    def _plan(self) -> int:
        """How many more slots will be held. The rank has `slots_max` more than the poorest, so there is always room."""
        page = self._engine.page_size
        held = sum(len(slots) for slots in self._held) + self._planned
        if self._ended or not self._slots_max:
            return -held
        if self._rng.random() > 0.3:
            return 0
        return self._rng.randint(0, self._slots_max) // page * page - held

    def _change(self, slots: int) -> None:
        allocator = self._allocator
        if slots > 0:
            taken = self._engine.take_device(self._pool, slots)
            if taken is not None:
                self._held.append(taken)
        elif slots < 0 and self._held:
            held = torch.cat(self._held)
            allocator.free(held[:-slots])
            rest = held[-slots:]
            self._held = [rest] if len(rest) else []
