import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.errors import InvariantBroken
from kvcoord.protocol.ledger import Ledger

PAGES = 20


class Pool:
    """One rank's pool: what is free here, and what its operations hold."""

    def __init__(self) -> None:
        self.free = PAGES
        self.held: list[int] = []


def run(seed: int, ranks: int, lag: int, steps: int) -> int:
    """Lockstep ranks take covered pages and free them each when it likes. Returns how many operations were covered."""
    dice = random.Random(seed)
    pools = [Pool() for _ in range(ranks)]
    ledger = Ledger(1)
    ledger.begin([PAGES])
    verdicts: list[int] = []
    covered = 0
    for step in range(steps):
        if step >= lag:
            ledger.settle(step - lag, [verdicts[step - lag]])
        for _ in range(dice.randint(0, 3)):
            pages = dice.randint(1, 6)
            if dice.random() < 0.2 and all(pages in pool.held for pool in pools):
                for pool in pools:
                    pool.held.remove(pages)
                    pool.free += pages
                ledger.credit(0, pages)
            elif pages <= ledger.available(0):
                covered += 1
                ledger.issue(0, pages)
                for pool in pools:
                    assert pool.free >= pages, "a covered operation does not fit"
                    pool.free -= pages
                    pool.held.append(pages)
        ledger.mark(step)
        verdicts.append(min(pool.free for pool in pools))
        for pool in pools:
            while pool.held and dice.random() < 0.3:
                pool.free += pool.held.pop(dice.randrange(len(pool.held)))
    return covered


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(1, 3))
def test_what_is_covered_fits_on_every_rank(seed: int, ranks: int, lag: int) -> None:
    run(seed, ranks, lag, 30)


def test_pages_that_come_back_are_covered_again() -> None:
    assert run(1, 2, 1, 400) * 3 > PAGES * 10


def test_pages_freed_by_one_rank_alone_count_only_from_the_next_verdict() -> None:
    ledger = Ledger(2)
    ledger.begin([8, 4])
    ledger.issue(0, 8)
    assert [ledger.available(0), ledger.available(1)] == [0, 4]
    ledger.mark(0)
    ledger.issue(1, 1)
    ledger.settle(0, [3, 4])
    assert [ledger.available(0), ledger.available(1)] == [3, 3]


def test_a_credit_is_there_at_once_and_not_counted_twice() -> None:
    ledger = Ledger(1)
    ledger.begin([2])
    ledger.mark(0)
    ledger.credit(0, 5)
    assert ledger.available(0) == 7
    ledger.settle(0, [2])
    assert ledger.available(0) == 7
    ledger.mark(1)
    ledger.settle(1, [7])
    assert ledger.available(0) == 7


def test_nothing_is_covered_after_a_round_without_all_ranks() -> None:
    ledger = Ledger(1)
    ledger.begin([8])
    ledger.mark(0)
    ledger.issue(0, 1)
    ledger.settle(0, [0])
    assert ledger.available(0) == 0


def test_a_verdict_without_its_frame_is_a_broken_invariant() -> None:
    ledger = Ledger(1)
    ledger.begin([8])
    ledger.mark(4)
    with pytest.raises(InvariantBroken):
        ledger.settle(3, [8])
    with pytest.raises(InvariantBroken):
        ledger.settle(4, [8, 8])
