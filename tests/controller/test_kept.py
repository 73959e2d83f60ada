"""What the host tiers of the ranks still hold when a history ends: the pages that all hold are kept, no others."""

import random

import pytest

from kvcoord.controller.assembly import make_worker
from kvcoord.controller.kept import NOTHING, HostPages
from kvcoord.controller.worker import WorkerEffect
from kvcoord.domain import PageKey, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.index.results import Branch
from kvcoord.protocol.effects import SendUp
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Match,
    Matched,
    Release,
    WriteThrough,
    join_keys,
)
from kvcoord.protocol.messages import StreamVote
from tests.controller.cluster import Cluster

PROMPTS = [block_page_keys([1, prompt, *range(10 * prompt, 10 * prompt + 3)]) for prompt in range(2, 9)]


class Lives(Cluster):
    """Ranks whose engines end and begin together. Votes of the ranks in `unheard` are lost."""

    def __init__(self, ranks: int, device: int, host: int | list[int], model: str = "m", **group: object) -> None:
        self.unheard: set[int] = set()
        super().__init__(ranks, device, host, **group)
        self.register(model)

    def register(self, model: str) -> None:
        for worker in self.workers:
            worker.registered(model)

    def bequests(self) -> list[HostPages]:
        """All engines end: their workers leave, and say what they still hold."""
        for worker in self.workers:
            worker.cache.abandon()
        return [worker.bequeath() for worker in self.workers]

    def next_life(self, pages: list[HostPages], model: str = "m", late: frozenset[int] = frozenset()) -> None:
        """Machines that begin with these pages, in the same group. Those that are `late` wait for `come`."""
        for rank, held in enumerate(pages):
            for effect in self.coordinator.gone(str(rank).encode(), self.now):
                self._send_down(effect)
            former = self.workers[rank].rank
            assert former is not None
            self.workers[rank] = make_worker(self.configs[rank], former.identity.incarnation + 100)
            self.workers[rank].host.inherit(held, self.workers[rank].cache.state)
            self.copies[rank].clear()
        self.step = 0
        self.register(model)
        for rank in range(len(pages)):
            if rank not in late:
                self.come(rank)

    def come(self, rank: int) -> None:
        self._perform(rank, self.workers[rank].start(self.now))
        self.run()

    def _perform(self, rank: int, effects: list[WorkerEffect]) -> None:
        def lost(effect: WorkerEffect) -> bool:
            return rank in self.unheard and isinstance(effect, SendUp) and isinstance(effect.message, StreamVote)

        super()._perform(rank, [effect for effect in effects if not lost(effect)])

    def matched(self, keys: list[PageKey]) -> list[tuple[int, int]]:
        found = [answer for (answer,) in self.ask(Match(join_keys(keys))) if isinstance(answer, Matched)]
        return [(match.device_pages, match.host_pages) for match in found]


def warm(ranks: int = 2, host: int | list[int] = 40, limits: dict[str, int] | None = None) -> Lives:
    """A group that has served all prompts."""
    lives = Lives(ranks, 40, host, limits=limits or {})
    for keys in PROMPTS:
        lives.serve(keys)
    return lives


def without(pages: HostPages, gone: set[PageKey]) -> HostPages:
    """The same, but some pages are not there any more."""
    branches: list[Branch] = []
    last: list[int] = []
    for branch in pages.branches:
        above = last[branch.above] if branch.above >= 0 else -1
        for at, key in enumerate(branch.keys):
            there = branch.slots is not None and key not in gone
            slots = tuple([[pool[at]] for pool in branch.slots or ()]) if there else None
            branches.append(Branch(above, [key], slots))
            above = len(branches) - 1
        last.append(above)
    tails = [{key: slot for key, slot in held.items() if key not in gone} for held in pages.tails]
    return HostPages(branches, pages.model, tails)


def keys_of(pages: HostPages) -> set[PageKey]:
    return {key for branch in pages.branches if branch.slots is not None for key in branch.keys}


def test_a_next_engine_of_the_same_model_finds_every_page_of_the_host_tier_again() -> None:
    lives = warm()
    for _ in range(3):
        lives.next_life(lives.bequests())
        for keys in PROMPTS:
            assert lives.matched(keys) == [(0, len(keys))] * 2
        assert lives.serve(PROMPTS[0]) == (0, len(PROMPTS[0]))
        lives.check()


def test_what_is_served_after_a_restart_is_what_a_run_without_one_serves_from_the_host() -> None:
    lives = warm(host=20)
    lives.next_life(lives.bequests())
    for keys in PROMPTS * 3:
        lives.serve(keys)
        lives.check()


@pytest.mark.parametrize("model", ["another", ""])
def test_pages_of_another_model_or_of_an_unnamed_one_are_dropped_on_all_ranks(model: str) -> None:
    lives = warm()
    lives.next_life(lives.bequests(), model)
    lives.advance()
    for keys in PROMPTS:
        assert lives.matched(keys) == [(0, 0)] * 2
    assert all(worker.cache.state.pools.host[0].used_count == 0 for worker in lives.workers)
    lives.check()


def test_pages_are_never_passed_on_under_the_name_of_an_engine_that_came_before_its_machine() -> None:
    """Copies of the last engine still run, so the next one registers with the machine that has left."""
    lives = warm()
    lives.register("another")
    assert lives.bequests() == [NOTHING, NOTHING]
    assert [worker.host.held(worker.cache.state) for worker in lives.workers] == [0, 0]


def test_pages_that_are_not_agreed_yet_are_not_voted_on_for_an_engine_of_another_model() -> None:
    lives = warm()
    lives.next_life(lives.bequests(), model="another")
    assert all(worker.rank is not None and worker.rank.stream.sequence == 0 for worker in lives.workers)
    lives.serve(PROMPTS[0])
    lives.check()


def test_pages_of_an_engine_that_named_no_model_are_not_kept() -> None:
    lives = Lives(2, 40, 40, model="")
    lives.serve(PROMPTS[0])
    assert lives.bequests() == [NOTHING, NOTHING]


def test_only_what_every_rank_holds_is_kept_and_the_rest_is_free_again() -> None:
    lives = warm(3)
    pages = lives.bequests()
    gone = [{PROMPTS[0][-1]}, set(), {PROMPTS[1][-1], PROMPTS[2][-2]}]
    lives.next_life([without(held, lost) for held, lost in zip(pages, gone, strict=True)])
    assert lives.matched(PROMPTS[0]) == [(0, len(PROMPTS[0]) - 1)] * 3
    assert lives.matched(PROMPTS[1]) == [(0, len(PROMPTS[1]) - 1)] * 3
    assert lives.matched(PROMPTS[2]) == [(0, len(PROMPTS[2]) - 2)] * 3
    assert lives.matched(PROMPTS[3]) == [(0, len(PROMPTS[3]))] * 3
    for worker in lives.workers:
        pool = worker.cache.state.pools.host[0]
        assert pool.used_count == worker.cache.state.tree.pages(Tier.HOST)
        assert pool.used_count == pages[0].count - 3
    for keys in PROMPTS:
        lives.serve(keys)
    lives.check()


def test_when_one_rank_has_nothing_left_nothing_is_kept_and_nothing_is_asked() -> None:
    lives = warm(3)
    pages = lives.bequests()
    lives.next_life([pages[0], NOTHING, pages[2]])
    assert all(worker.rank is not None and worker.rank.stream.sequence == 0 for worker in lives.workers)
    assert lives.matched(PROMPTS[0]) == [(0, 0)] * 3
    lives.serve(PROMPTS[0])
    lives.check()


@pytest.mark.parametrize("portions", [1, 4, 32])
def test_many_pages_are_agreed_on_in_portions_that_stay_below_the_limit_of_a_message(portions: int) -> None:
    keys_max = {1: 100, 4: 10, 32: 1}[portions]
    limits = {"pages_per_operation_max": 8, "message_bytes_max": keys_max * 8 * 16}
    lives = warm(2, limits=limits)
    pages = lives.bequests()
    lives.next_life(pages)
    assert all(worker.rank is not None and worker.rank.stream.sequence >= portions for worker in lives.workers)
    kept = {worker.cache.state.tree.pages(Tier.HOST) for worker in lives.workers}
    assert len(kept) == 1
    assert portions > 1 or kept == {pages[0].count}
    lives.serve(PROMPTS[0])
    lives.check()


def test_calls_wait_until_it_is_agreed_what_is_kept() -> None:
    lives = warm()
    lives.next_life(lives.bequests(), late=frozenset({1}))
    numbers = [lives.begin(0, call) for call in (Match(join_keys(PROMPTS[0])), Advance(0))]
    lives.run()
    assert not set(numbers) & set(lives.answers[0])
    lives.unheard = {1}
    lives.come(1)
    assert not set(numbers) & set(lives.answers[0])
    lives.unheard = set()
    lives.pass_time(1.0)
    assert lives.answers[0][numbers[0]] == Matched(0, len(PROMPTS[0]))
    assert numbers[1] in lives.answers[0]


def test_what_a_rank_does_not_vote_on_in_time_is_dropped_on_all_and_the_group_goes_on() -> None:
    lives = warm()
    lives.unheard = {1}
    lives.next_life(lives.bequests())
    for _ in range(12):
        lives.pass_time(0.5)
    assert lives.matched(PROMPTS[0]) == [(0, 0)] * 2
    lives.unheard = set()
    lives.serve(PROMPTS[0])
    lives.check()


def test_a_group_that_begins_anew_while_it_agrees_keeps_what_all_hold_then() -> None:
    lives = warm()
    pages = lives.bequests()
    lives.unheard = {1}
    lives.next_life(pages)
    held = lives.bequests()
    assert [keys_of(now) for now in held] == [keys_of(before) for before in pages]
    lives.unheard = set()
    lives.next_life(held)
    assert lives.matched(PROMPTS[0]) == [(0, len(PROMPTS[0]))] * 2
    lives.serve(PROMPTS[0])
    lives.check()


def test_a_rank_whose_worker_was_restarted_empties_the_host_tier_of_all_under_living_engines() -> None:
    lives = warm()
    lives.restart(1)
    lives.run()
    lives.register("m")
    lives.step = 0
    assert lives.matched(PROMPTS[0]) == [(0, 0)] * 2
    lives.serve(PROMPTS[0])
    lives.check()


def test_a_kept_page_can_be_loaded_from_the_slot_it_was_left_in() -> None:
    lives = warm()
    slots = [worker.cache.state.tree.pin(PROMPTS[0], 0, len(PROMPTS[0]), Tier.HOST).slots for worker in lives.workers]
    lives.next_life(lives.bequests())
    lives.held = {0, 1}
    numbers = [lives.begin(rank, Acquire(join_keys(PROMPTS[0]), landed=False)) for rank in range(2)]
    lives.run()
    for rank, number in enumerate(numbers):
        (copy,) = lives.copies[rank]
        assert copy.source_slots == slots[rank]
        answer = lives.answers[rank][number]
        assert isinstance(answer, Acquired)
    lives.held.clear()
    lives.run()
    lives.ask(Release(1))
    lives.settle()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_ranks_still_hold_all_keep_the_same(seed: int) -> None:
    rng = random.Random(seed)
    lives = warm(3, host=[30, 26, 40])
    for _ in range(4):
        pages = [
            without(held, {key for keys in PROMPTS for key in keys if rng.random() < 0.2}) for held in lives.bequests()
        ]
        expected = set.intersection(*map(keys_of, pages))
        lives.next_life(pages)
        for worker in lives.workers:
            assert keys_of(HostPages(worker.cache.state.tree.outline(Tier.HOST))) == expected
        for _ in range(5):
            lives.serve(rng.choice(PROMPTS))
        lives.check()


def test_streaming_ranks_keep_their_host_tier_too() -> None:
    lives = Lives(2, 1000, 40, lockstep=False)
    slots = [list(range(len(PROMPTS[0])))]
    lives.ask(WriteThrough(keys=join_keys(PROMPTS[0]), slots=slots, operation="w"))
    lives.next_life(lives.bequests())
    assert lives.matched(PROMPTS[0]) == [(0, len(PROMPTS[0]))] * 2


def test_a_group_that_diverged_keeps_nothing() -> None:
    lives = warm()
    lives.workers[0].cache.state.digest.apply("only here")
    lives.advance()
    assert lives.bequests()[0] == NOTHING
