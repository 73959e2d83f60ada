"""What reserving, committing, aborting and loading do to SGLang's real classes, on two real processes."""

from typing import Any

import pytest

from tests.sglang.engine import Engine, Groups
from tests.sglang.slow import SlowCopies
from tests.sglang.world import run_ranks, values

TOKENS = list(range(1000, 1064))
OTHER = list(range(2000, 2064))


def state(engine: Engine, tokens: list[int] = TOKENS) -> dict[str, Any]:
    """What can be seen of one write from outside."""
    controller = engine.controller
    return {
        "host_free": engine.host.available_size(),
        "queued": len(controller.write_queue),
        "copies": len(controller.ack_write_queue),
        "ongoing": len(engine.cache.ongoing_write_through),
        "pending": len(engine.cache.agreement.writes),
        "on_host": engine.cache.is_backuped(engine.match(tokens).last_device_node),
        "locked": engine.cache.protected_size(),
    }


def on_two_ranks(scenario: Any, **options: Any) -> list[Any]:
    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups, **options)
        told = scenario(engine, groups.rank)
        engine.cache.sanity_check()
        engine.close()
        return told

    return values(run_ranks(on_rank))


def fill_host(engine: Engine, left: int) -> Any:
    return engine.host.alloc(engine.host.available_size() - left)


def steal_what_is_evicted(engine: Engine) -> None:
    """Something else takes every host slot as soon as it is free."""
    evict = engine.cache.evict_host

    def evict_and_steal(*arguments: Any) -> Any:
        evicted = evict(*arguments)
        fill_host(engine, 0)
        return evicted

    engine.cache.evict_host = evict_and_steal


def test_a_reservation_takes_host_slots_and_changes_nothing_else() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        engine.insert(TOKENS)
        engine.step()
        return state(engine)

    for told in on_two_ranks(scenario):
        assert told == {
            "host_free": 512 - 64,
            "queued": 0,
            "copies": 0,
            "ongoing": 0,
            "pending": 1,
            "on_host": False,
            "locked": 64,
        }


def test_a_reservation_that_fails_holds_nothing() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        fill_host(engine, 32)
        engine.insert(TOKENS)
        engine.step()
        return state(engine)

    for told in on_two_ranks(scenario):
        assert (told["host_free"], told["queued"], told["on_host"]) == (32, 0, False)


def test_a_commit_publishes_the_slots_and_starts_the_copy() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        SlowCopies(engine, lambda: 99)
        engine.insert(TOKENS)
        engine.step(2)
        return state(engine)

    for told in on_two_ranks(scenario):
        assert told == {
            "host_free": 512 - 64,
            "queued": 0,
            "copies": 1,
            "ongoing": 1,
            "pending": 0,
            "on_host": True,
            "locked": 64,
        }


def test_an_abort_gives_the_slots_back_and_leaves_no_queue_and_no_lock() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        held = fill_host(engine, 32) if rank == 1 else None
        engine.insert(TOKENS)
        engine.step(4)
        if held is not None:
            engine.host.free(held)
        return state(engine)

    for told in on_two_ranks(scenario):
        assert told == {
            "host_free": 512,
            "queued": 0,
            "copies": 0,
            "ongoing": 0,
            "pending": 0,
            "on_host": False,
            "locked": 0,
        }


def test_a_write_that_all_ranks_can_make_ends_on_the_host_and_holds_its_bytes() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        engine.insert(TOKENS)
        engine.step(5)
        told = state(engine)
        engine.evict(64)
        engine.wipe()
        engine.load_back(engine.match(TOKENS))
        return told, engine.holds(engine.match(TOKENS).last_device_node, TOKENS)

    for told, right_bytes in on_two_ranks(scenario):
        assert (told["on_host"], told["ongoing"], told["locked"], told["copies"]) == (True, 0, 0, 0)
        assert right_bytes


def test_a_write_that_no_rank_has_room_for_is_dropped() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        fill_host(engine, 0)
        engine.insert(TOKENS)
        engine.step(5)
        return state(engine)

    for told in on_two_ranks(scenario):
        assert (told["on_host"], told["pending"], told["locked"], told["host_free"]) == (False, 0, 0, 0)


def test_the_rank_that_had_room_aborts_with_the_one_that_had_not() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        held = fill_host(engine, 63) if rank == 1 else None
        engine.insert(TOKENS)
        engine.step(5)
        assert held is None or len(held)
        return engine.cache.is_backuped(engine.match(TOKENS).last_device_node), engine.evict(64)

    assert on_two_ranks(scenario) == [(False, 64), (False, 64)]


def test_the_rank_that_could_not_reserve_neither_gives_back_twice_nor_commits() -> None:
    """SGLang's host pool raises for slots that are freed twice."""

    def scenario(engine: Engine, rank: int) -> Any:
        held = fill_host(engine, 32) if rank == 1 else None
        engine.insert(TOKENS)
        engine.step(5)
        free = engine.host.available_size()
        return free + (0 if held is None else len(held)), state(engine)["on_host"]

    assert on_two_ranks(scenario) == [(512, False), (512, False)]


def test_a_shortage_that_an_eviction_cures_commits_at_the_second_attempt() -> None:
    """Rank 1's pool shrinks after its frame was counted, so only the vote shows it; what is evicted is then enough."""

    def scenario(engine: Engine, rank: int) -> Any:
        engine.insert(OTHER)
        engine.step(5)
        engine.evict(64)
        held = fill_host(engine, 32) if rank == 1 else None
        engine.insert(TOKENS)
        engine.step(8)
        free = engine.host.available_size() + (0 if held is None else len(held))
        return state(engine)["on_host"], engine.match(OTHER).host_hit_length, free

    assert on_two_ranks(scenario) == [(True, 0, 512 - 64), (True, 0, 512 - 64)]


@pytest.mark.parametrize("shape", [{"tp": 2}, {"tp": 1, "pp": 2}], ids=["tp2", "pp2"])
def test_while_a_write_aborts_no_rank_promises_slots_that_another_has_not(shape: dict[str, Any]) -> None:
    """Frames that were counted before the abort is known show the slots as taken on one rank only."""

    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups)
        held = fill_host(engine, 32) if groups.rank == 1 else None
        engine.step(4)
        engine.insert(TOKENS)
        promised = []
        for _ in range(8):
            engine.step()
            promised.append(engine.cache.agreement.capacity.host_available())
            assert promised[-1] <= engine.host.available_size()
        assert held is None or len(held)
        engine.close()
        return promised

    first, second = values(run_ranks(on_rank, **shape))
    assert first == second
    assert first[-1] == 32


def test_when_the_second_attempt_aborts_as_well_the_same_nodes_are_gone_on_both_ranks() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        engine.insert(OTHER)
        engine.step(5)
        engine.evict(64)
        if rank == 1:
            fill_host(engine, 32)
            steal_what_is_evicted(engine)
        engine.insert(TOKENS)
        engine.step(6)
        return state(engine)["on_host"], engine.match(OTHER).host_hit_length, state(engine)["locked"]

    assert on_two_ranks(scenario) == [(False, 0, 0)] * 2


def test_a_rank_that_takes_no_part_is_named_on_both() -> None:
    def on_rank(groups: Groups) -> None:
        engine = Engine(groups)
        if groups.rank == 1:
            engine.cache.agreement.writes.intend = lambda nodes: None
        engine.insert(TOKENS)
        engine.step(4)

    for result in run_ranks(on_rank):
        assert "Diverged" in result.error
        assert "intend" in result.error


def test_a_write_back_goes_to_the_host_of_every_rank_or_is_dropped_on_every_rank() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        engine.insert(TOKENS)
        engine.step(2)
        demoted = engine.evict(64), engine.match(TOKENS).host_hit_length
        if rank == 1:
            fill_host(engine, 32)
        engine.step(2)
        engine.insert(OTHER)
        dropped = engine.evict(64), engine.match(OTHER).host_hit_length
        return demoted, dropped

    first, second = on_two_ranks(scenario, write_policy="write_back", host_slots=96)
    assert first == second
    assert first[0] == (64, 64)


def written_and_evicted(engine: Engine) -> Any:
    engine.insert(TOKENS)
    engine.step(5)
    engine.evict(64)
    return engine.match(TOKENS)


def test_a_load_that_all_ranks_can_make_ends_with_its_bytes_and_without_locks() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        match = written_and_evicted(engine)
        engine.wipe()
        loaded, node = engine.load_back(match)
        engine.step(4)
        return loaded, engine.holds(node, TOKENS), len(engine.cache.ongoing_load_back), state(engine)["locked"]

    assert on_two_ranks(scenario) == [(64, True, 0, 0)] * 2


def test_a_load_that_one_rank_cannot_make_is_made_by_none() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        match = written_and_evicted(engine)
        held = engine.allocator.alloc(engine.device_free() - 32) if rank == 1 else None
        engine.step(3)
        loaded, _ = engine.load_back(match)
        free = engine.device_free() + (0 if held is None else len(held))
        return loaded, free, state(engine)["locked"], engine.match(TOKENS).host_hit_length

    assert on_two_ranks(scenario) == [(0, 256, 0, 64)] * 2


def test_a_load_that_is_refused_evicts_nothing_and_keeps_its_source() -> None:
    def scenario(engine: Engine, rank: int) -> Any:
        match = written_and_evicted(engine)
        held = engine.allocator.alloc(engine.device_free()) if rank == 1 else None
        engine.step(3)
        engine.load_back(match)
        engine.load_back(engine.match(TOKENS))
        engine.step(3)
        assert held is None or len(held)
        return engine.match(TOKENS).host_hit_length, engine.host.available_size()

    assert on_two_ranks(scenario) == [(64, 512 - 64)] * 2


def test_a_load_makes_room_by_evicting_the_same_nodes_on_both_ranks() -> None:
    """Rank 1 alone is short of slots; both evict."""

    def scenario(engine: Engine, rank: int) -> Any:
        match = written_and_evicted(engine)
        engine.insert(OTHER)
        engine.step(5)
        held = engine.allocator.alloc(engine.device_free()) if rank == 1 else None
        engine.step(3)
        loaded, _ = engine.load_back(match)
        engine.step(4)
        assert held is None or len(held)
        other = engine.match(OTHER)
        return loaded, other.device_prefix_len, other.host_hit_length

    assert on_two_ranks(scenario) == [(64, 0, 64)] * 2


def test_a_node_that_is_split_while_it_is_written_is_committed_in_all_its_parts() -> None:
    """Once between intent and reservation, once between reservation and commit."""

    def scenario(engine: Engine, _: int) -> Any:
        engine.insert(TOKENS)
        engine.match(TOKENS[:16] + OTHER[:8])
        engine.step()
        engine.match(TOKENS[:40] + OTHER[:8])
        engine.step(5)
        engine.evict(64)
        engine.wipe()
        match = engine.match(TOKENS)
        loaded, node = engine.load_back(match)
        engine.step(3)
        return loaded, engine.holds(node, TOKENS), state(engine)["locked"]

    assert on_two_ranks(scenario) == [(64, True, 0)] * 2


def test_a_reset_forgets_what_is_open_and_the_next_life_works() -> None:
    def scenario(engine: Engine, _: int) -> Any:
        engine.insert(TOKENS)
        engine.step()
        engine.insert(OTHER)
        engine.cache.reset()
        engine.allocator.clear()
        engine.step(3)
        empty = state(engine)["host_free"], engine.match(TOKENS).device_prefix_len
        engine.insert(TOKENS)
        engine.step(5)
        return empty, state(engine)["on_host"], state(engine)["locked"]

    assert on_two_ranks(scenario) == [((512, 0), True, 0)] * 2


def test_a_group_of_one_rank_needs_nobody_else() -> None:
    def on_rank(groups: Groups) -> Any:
        engine = Engine(groups)
        engine.insert(TOKENS)
        engine.step(5)
        told = state(engine)
        engine.close()
        return told["on_host"], told["locked"]

    assert values(run_ranks(on_rank, tp=1)) == [(True, 0)]
