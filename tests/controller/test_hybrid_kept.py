"""What hybrid groups keep when a history ends: pages, and those slots in pools of ends that all ranks hold."""

import msgspec

from kvcoord.controller.kept import HostPages
from kvcoord.domain import PageKey, Tier
from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import Match, Matched, join_keys
from tests.controller.hybrid import check_conservation, pools
from tests.controller.test_kept import Lives, without

PATHS = [block_page_keys([1, path, *range(10 * path, 10 * path + 3)]) for path in (2, 3)]
STATE = 1


def warm() -> Lives:
    """Two ranks that have served both paths."""
    lives = Lives(2, 40, 40, pools_by_rank=[pools(), pools()])
    for path in PATHS:
        lives.serve(path)
    return lives


def without_end(pages: HostPages, number: int, key: PageKey) -> HostPages:
    """The same, but one page has lost its slot in one pool of ends."""
    tails = [dict(held) for held in pages.tails]
    del tails[number][key]
    return msgspec.structs.replace(pages, tails=tails)


def usable(lives: Lives, path: list[PageKey]) -> set[int]:
    found = [answer for (answer,) in lives.ask(Match(join_keys(path))) if isinstance(answer, Matched)]
    return {match.device_pages + match.host_pages for match in found}


def check(lives: Lives) -> None:
    lives.check()
    for worker in lives.workers:
        check_conservation(worker.cache.state)


def test_the_next_engine_finds_whole_prefixes_again() -> None:
    lives = warm()
    for _ in range(2):
        lives.next_life(lives.bequests())
        lives.advance()
        for path in PATHS:
            assert usable(lives, path) == {len(path)}
        check(lives)
    assert lives.serve(PATHS[0]) == (0, len(PATHS[0]))
    check(lives)


def test_an_end_that_one_rank_has_lost_is_dropped_by_all_and_its_prefix_with_it() -> None:
    lives = warm()
    held = lives.bequests()
    lives.next_life([held[0], without_end(held[1], STATE, PATHS[0][-1])])
    lives.advance()
    assert [usable(lives, path) for path in PATHS] == [{0}, {len(PATHS[1])}]
    for worker in lives.workers:
        assert worker.cache.state.tree.tails.counts(Tier.HOST) == [6, 1]
        assert worker.cache.state.tree.pages(Tier.HOST) == 9
    check(lives)


def test_the_usable_prefix_is_the_minimum_over_pools_and_ranks_and_the_rest_is_free() -> None:
    """Class N. One rank has six of eight pages, and no state for the sixth: four are usable on both."""
    path = block_page_keys(range(1, 9))
    lives = Lives(2, 40, 40, pools_by_rank=[pools(), pools()])
    for end in (4, 6, 8):
        lives.serve(path[:end])
    complete, partial = lives.bequests()
    partial = without_end(without(partial, set(path[6:])), STATE, path[5])
    lives.next_life([complete, partial])
    lives.advance()
    assert usable(lives, path) == {4}
    for worker in lives.workers:
        state = worker.cache.state
        assert state.tree.pages(Tier.HOST) == 6
        assert state.tree.tails.counts(Tier.HOST) == [5, 1]
        assert [pool.free_count for pool in state.pools.host] == [34, 34, 7, 5]
    check(lives)


def test_pages_of_another_model_leave_no_end_behind() -> None:
    lives = warm()
    lives.next_life(lives.bequests(), "another")
    lives.advance()
    for worker in lives.workers:
        assert all(pool.free_count == pool.capacity for pool in worker.cache.state.pools.host)
    check(lives)


def test_what_is_agreed_comes_in_portions_too() -> None:
    lives = Lives(2, 40, 40, pools_by_rank=[pools(), pools()], limits={"pages_per_operation_max": 6})
    for path in PATHS:
        lives.serve(path)
    lives.next_life(lives.bequests())
    lives.advance()
    assert all(usable(lives, path) <= {0, len(path)} for path in PATHS)
    assert [worker.cache.state.tree.pages(Tier.HOST) > 0 for worker in lives.workers] == [True, True]
    check(lives)
