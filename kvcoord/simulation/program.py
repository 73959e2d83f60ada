"""What engines do, as a function of the seed and the step alone: all ranks of a group run the same program."""

import random
from typing import Final

import msgspec

from kvcoord.domain import Agreement, PageKey
from kvcoord.index.keys import block_page_keys

PROMPTS: Final = [
    block_page_keys([0, *range(100 * prompt, 100 * prompt + prompt % 6 + 1)])[: prompt % 6 + 2]
    for prompt in range(1, 19)
]
"""Paths that share their first page, two to seven pages long."""


class AcquireWanted(msgspec.Struct, frozen=True):
    """A request: its path, how many steps it runs, whether what it computes is published, and whether it waits."""

    keys: list[PageKey]
    steps: int
    published: bool
    deferred: bool
    landed: bool


class AgreeWanted(msgspec.Struct, frozen=True):
    """A vote of the engine's own. `no_by`: the rank that votes no, -1 for none."""

    operation: str
    agreement: Agreement
    participants: int
    deferred: bool
    no_by: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step of a lockstep engine does besides advancing. `evict_host`: pages. `spare`: slots, soon freed."""

    acquires: list[AcquireWanted]
    agree: AgreeWanted | None
    evict_host: int
    spare: int


class Program:
    """The steps of one group's engines."""

    def __init__(self, seed: int, ranks: int) -> None:
        self._seed = seed
        self._ranks = ranks
        self._plans: dict[int, StepPlan] = {}

    def step(self, number: int) -> StepPlan:
        plan = self._plans.get(number)
        if plan is None:
            plan = self._plans[number] = self._draw(number)
        return plan

    def _draw(self, number: int) -> StepPlan:
        rng = random.Random(f"{self._seed}/step/{number}")
        acquires = [self._acquire(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        agree = self._agree(rng, f"engine-{number}") if rng.random() < 0.15 else None
        evict_host = rng.randint(1, 4) if rng.random() < 0.05 else 0
        spare = rng.randint(1, 3) if rng.random() < 0.1 else 0
        return StepPlan(acquires, agree, evict_host, spare)

    def _acquire(self, rng: random.Random) -> AcquireWanted:
        path = rng.choice(PROMPTS)
        return AcquireWanted(
            path[: rng.randint(1, len(path))],
            rng.choice((1, 1, 2, 5)),
            rng.random() < 0.9,
            rng.random() < 0.8,
            rng.random() < 0.6,
        )

    def _agree(self, rng: random.Random, operation: str) -> AgreeWanted:
        everyone = (1 << self._ranks) - 1
        participants = rng.choice((0, 0, rng.randint(1, everyone)))
        no_by = rng.randrange(self._ranks) if rng.random() < 0.2 else -1
        return AgreeWanted(operation, rng.choice(list(Agreement)), participants, rng.random() < 0.5, no_by)


def agreed_value(agreement: Agreement, rank: int) -> int | list[bytes] | None:
    """What this rank puts into the vote: ranks differ where the agreement allows it."""
    if agreement is Agreement.ALL:
        return None
    if agreement is Agreement.EQUAL:
        return 7
    return [b"a", b"b", bytes([99 + rank])] if agreement is Agreement.INTERSECT else 10 + rank
