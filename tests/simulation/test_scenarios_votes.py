"""Scenarios from the field that are about votes and who takes part in them: I to N."""

import pytest

from kvcoord.domain import Aborted, Agreement, Committed, Path, Reason, Tier
from kvcoord.protocol.local import (
    Agree,
    Agreed,
    LoadBack,
    Loaded,
    WriteThrough,
    Written,
    join_keys,
)
from tests.simulation.phases import PHASES, begin_anew
from tests.simulation.scripted import CORNERS, ODD_RANKS, SHAPES, Script, hosts, pages

A = pages(1, 2, 3, 4)
B = pages(11, 12)


@pytest.mark.parametrize(("tp", "pp"), [shape for shape in SHAPES if shape[1] > 1])
def test_scenario_i_stages_take_note_of_a_completion_at_the_same_step(tp: int, pp: int) -> None:
    """The copies of each stage end at a time of their own."""
    script = Script(tp, pp)
    script.hold_copies(*script.everyone)
    script.write(script.acquire(A)[0].lease)
    for rank in script.everyone:
        script.advance()
        script.release_copies(rank)
    completed = [advanced.completed for advanced in script.settle()]
    assert sum(map(len, completed)) == 1
    script.check_rest()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tp", "pp", "odd"), CORNERS)
def test_scenario_j_an_engine_that_ends_at_any_phase_leaves_nothing_behind(
    tp: int, pp: int, odd: int, phase: str
) -> None:
    script = Script(tp, pp, host=12)
    PHASES[phase](script, odd)
    script.engines[odd].restart()
    begin_anew(script)


@pytest.mark.parametrize(("tp", "pp", "odd"), [sweep for sweep in ODD_RANKS if sweep[:2] != (1, 1)])
def test_scenario_j_an_operation_whose_caller_gave_up_on_one_rank_aborts_on_all(tp: int, pp: int, odd: int) -> None:
    """It comes to it after all, and hears what became of it; nothing was copied, and every page is free again."""
    script = Script(tp, pp, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    call = WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write")
    numbers = {rank: script.engines[rank].ask(call) for rank in script.everyone if rank != odd}
    script.pass_time(script.world.shape.timeouts.vote_timeout_s + 0.5)
    numbers[odd] = script.engines[odd].ask(call)
    script.wait(lambda: all(number in script.engines[rank].answers for rank, number in numbers.items()))
    told = [script.engines[rank].answers[number] for rank, number in numbers.items()]
    expected = Aborted("write/0", Path.IMMEDIATE, Reason.VOTE_TIMEOUT, odd)
    assert [answer.outcome for answer in told if isinstance(answer, Written)] == [expected] * len(script.ranks)
    assert {rank.worker.cache.state.pools.free(Tier.HOST) for rank in script.ranks} == {16}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_k_a_load_of_nothing_ends_at_once_and_is_told_apart_from_one_that_is_not_done(
    tp: int, pp: int, odd: int
) -> None:
    script = Script(tp, pp, lockstep=False)
    nothing = script.call(LoadBack(join_keys(A), [[0, 1, 2, 3]], "nothing", landed=True))
    assert [answer.pages for answer in nothing if isinstance(answer, Loaded)] == [0] * len(script.ranks)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.hold_copies(odd)
    numbers = script.ask(LoadBack(join_keys(A), [[4, 5, 6, 7]], "load", landed=True))
    script.pass_time(1.0)
    assert [number in engine.answers for engine, number in zip(script.engines, numbers, strict=True)] == [
        rank != odd for rank in script.everyone
    ]
    script.release_copies(odd)
    assert [answer.pages for answer in script.answers(numbers) if isinstance(answer, Loaded)] == [4] * len(script.ranks)


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_l_the_shortest_prefix_of_all_ranks_is_what_all_use(tp: int, pp: int, odd: int) -> None:
    script = Script(tp, pp, lockstep=False)
    numbers = [
        script.engines[rank].ask(Agree("prefix", True, Agreement.MIN, value=3 if rank == odd else 4))
        for rank in script.everyone
    ]
    outcomes = [answer.outcome for answer in script.answers(numbers) if isinstance(answer, Agreed)]
    assert outcomes == [Committed("prefix", Path.IMMEDIATE, 3)] * len(script.ranks)


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_l_what_a_load_was_promised_is_not_evicted_before_it_has_landed(tp: int, pp: int, odd: int) -> None:
    """The pressure comes between the lookup and the end of the copy on one rank."""
    script = Script(tp, pp, lockstep=False, host=4)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
        rank.memory.fill(Tier.DEVICE, [[4, 5]], B)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.hold_copies(odd)
    loading = script.ask(LoadBack(join_keys(A), [[8, 9, 10, 11]], "load", landed=True))
    pressing = script.call(WriteThrough(keys=join_keys(B), slots=[[4, 5]], operation="pressure"))
    outcomes = [answer.outcome for answer in pressing if isinstance(answer, Written)]
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Aborted)} == {Reason.HOST_FULL}
    script.release_copies(odd)
    assert [answer.pages for answer in script.answers(loading) if isinstance(answer, Loaded)] == [4] * len(script.ranks)
    assert {rank.memory.wrong(Tier.DEVICE, [[8, 9, 10, 11]], A) for rank in script.ranks} == {""}
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), [sweep for sweep in ODD_RANKS if sweep[:2] not in ((1, 1), (2, 1))])
def test_scenario_m_only_the_participants_of_an_operation_are_waited_for(tp: int, pp: int, odd: int) -> None:
    """The others hear of it in the same sequence."""
    script = Script(tp, pp, lockstep=False)
    other = (odd + 1) % len(script.ranks)
    mask = 1 << odd | 1 << other
    numbers = {rank: script.engines[rank].ask(Agree("few", True, participants=mask)) for rank in (odd, other)}
    script.pass_time(0.1)
    for rank, number in numbers.items():
        answer = script.engines[rank].answers[number]
        assert isinstance(answer, Agreed)
        assert isinstance(answer.outcome, Committed)
    assert {rank.machine.stream.sequence for rank in script.ranks} == {1}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_n_pages_take_a_slot_in_every_pool_or_in_none(tp: int, pp: int, odd: int) -> None:
    script = Script(tp, pp, host=hosts(tp * pp, 8, odd, 6), pools=("kv", "index", "state"))
    script.write(script.acquire(pages(*range(1, 8)))[0].lease)
    outcomes = [outcome for advanced in script.settle() for outcome in advanced.outcomes]
    assert [outcome.shortfall for outcome in outcomes if isinstance(outcome, Aborted)] == [
        {"host.kv": 1, "host.index": 1, "host.state": 1}
    ]
    for rank in script.ranks:
        assert len(set(rank.worker.cache.state.pools.free_counts()[3:])) == 1
    script.check_rest()
