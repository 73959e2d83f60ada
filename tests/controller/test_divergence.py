"""Ranks whose digests differ: what each policy makes of it. The fault is planted in one rank's digest."""

import pytest

from kvcoord.domain import Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import Acquire, Acquired, Advance, Answer, Call, Failed, Release, WriteThrough, join_keys
from kvcoord.protocol.messages import Divergence, FromCoordinator
from tests.controller.cluster import Cluster
from tests.controller.test_kept import Lives

KEYS = block_page_keys([1, 2, 3])
OTHERS = block_page_keys([4, 5])


class Deaf(Lives):
    """Ranks of which some do not hear that they differ."""

    deaf: frozenset[int] = frozenset()

    def _hears(self, rank: int, message: FromCoordinator) -> bool:
        return rank not in self.deaf or not isinstance(message, Divergence)

    def _deliver(self) -> bool:
        self._down = type(self._down)(held for held in self._down if self._hears(*held))
        return super()._deliver()


def parted(policy: str) -> Deaf:
    """A group that holds a path on the host, and is about to find out that rank 1 has applied something else."""
    lives = Deaf(3, 8, 16, divergence=policy)
    lives.serve(KEYS)
    lives.workers[1].cache.state.digest.apply("only here")
    return lives


def everywhere(lives: Cluster, call: Call) -> list[Answer]:
    """The engines of all ranks make a call that is answered at once, though perhaps not alike."""
    numbers = [lives.begin(rank, call) for rank in range(len(lives.workers))]
    lives.run()
    return [answers[number] for answers, number in zip(lives.answers, numbers, strict=True)]


def find_out(lives: Cluster) -> None:
    """The step whose frames show it."""
    everywhere(lives, Advance(lives.step))
    lives.step += 1


def begin_again(lives: Lives) -> None:
    """The engines drop what they had, and register."""
    lives.register("m")
    lives.step = 0
    lives.advance()


def test_stop_answers_every_call_with_the_difference() -> None:
    lives = parted("stop")
    find_out(lives)
    for answer in everywhere(lives, Acquire(join_keys(KEYS))):
        assert isinstance(answer, Failed)
        assert answer.error == "Diverged"
        assert answer.fields[2:] == [[[0, 2], [1]], "nothing (ranks 0,2) against only here (ranks 1)"]
    assert [pages.count for pages in lives.bequests()] == [0, 0, 0]


def test_warn_goes_on() -> None:
    lives = parted("warn")
    find_out(lives)
    assert [worker.divergences for worker in lives.workers] == [1, 1, 1]
    assert all(isinstance(answer, Acquired) for answer in everywhere(lives, Acquire(join_keys(KEYS))))


@pytest.mark.parametrize("deaf", [(), (0,), (1,), (0, 2)])
def test_resync_drops_the_cache_on_all_ranks_and_goes_on_in_a_new_epoch(deaf: tuple[int, ...]) -> None:
    lives = parted("resync")
    lives.deaf = frozenset(deaf)
    before = lives.workers[0].rank.epoch  # type: ignore[union-attr]
    find_out(lives)
    for answer in everywhere(lives, Acquire(join_keys(KEYS))):
        assert isinstance(answer, Failed)
        assert answer.error == "GroupRenewed"
    assert {worker.rank.epoch > before for worker in lives.workers if worker.rank} == {True}
    assert [worker.renewals for worker in lives.workers] == [1, 1, 1]
    begin_again(lives)
    assert lives.matched(KEYS) == [(0, 0)] * 3
    assert lives.serve(KEYS) == (0, 0)
    assert lives.serve(KEYS) == (len(KEYS), 0)
    lives.check()
    assert [worker.cache.state.pools.host[0].used_count for worker in lives.workers] == [len(KEYS)] * 3


def test_the_engines_are_told_where_the_ranks_parted() -> None:
    lives = parted("resync")
    find_out(lives)
    (answer, *_) = everywhere(lives, Acquire(join_keys(KEYS)))
    assert isinstance(answer, Failed)
    step = lives.step - 1
    assert answer.fields[1] == f"the ranks differed at round {step}: nothing (ranks 0,2) against only here (ranks 1)"


def test_resync_waits_for_the_copies_that_run() -> None:
    lives = parted("resync")
    lives.held = {2}
    leases = lives.ask(Acquire(join_keys(OTHERS)))
    for rank, (lease,) in enumerate(leases):
        assert isinstance(lease, Acquired)
        lives.begin(rank, WriteThrough(lease=lease.lease))
        lives.begin(rank, Release(lease.lease))
    lives.run()
    assert len(lives.copies[2]) == 1
    find_out(lives)
    assert [worker.renewals for worker in lives.workers] == [1, 1, 0]
    lives.held.clear()
    lives.run()
    assert [worker.renewals for worker in lives.workers] == [1, 1, 1]
    begin_again(lives)
    assert lives.serve(OTHERS) == (0, 0)
    lives.check()


def test_resync_also_in_a_group_without_lockstep() -> None:
    lives = Lives(2, 1000, 40, lockstep=False, divergence="resync")
    lives.ask(WriteThrough(keys=join_keys(KEYS), slots=[[0, 1, 2]], operation="w"))
    assert lives.matched(KEYS) == [(0, len(KEYS))] * 2
    epoch = lives.workers[0].rank.epoch  # type: ignore[union-attr]
    lives._down += [(rank, Divergence(epoch, -1, [[0], [1]], "commit w")) for rank in range(2)]
    lives.run()
    lives.register("m")
    assert lives.matched(KEYS) == [(0, 0)] * 2
    assert [len(list(worker.cache.state.tree.outline(Tier.HOST))) for worker in lives.workers] == [0, 0]
