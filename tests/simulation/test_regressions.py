"""What the simulation has found in the machines, each as the short story that shows it."""

import msgspec

from kvcoord.domain import Tier
from kvcoord.errors import InvariantBroken
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Advanced,
    Agree,
    Agreed,
    Allocate,
    Allocated,
    Evict,
    Failed,
    LoadBack,
    Loaded,
    Release,
    WriteThrough,
    join_keys,
)
from tests.simulation.scripted import Script, pages

A = pages(1, 2, 3, 4)


def test_a_step_that_is_asked_for_twice_is_a_usage_error_and_the_worker_lives_on() -> None:
    """The verdict of the step was applied a second time, which broke the ledger and stopped the worker."""
    script = Script(2)
    for _ in range(3):
        script.advance()
    first = script.ask(Advance(3))
    again = script.ask(Advance(3))
    assert all(isinstance(answer, Advanced) for answer in script.answers(first))
    for answer in script.answers(again):
        assert isinstance(answer, Failed)
        assert answer.error == "UsageError"
    script.step = 4
    script.cache(A)
    script.check_rest()


def test_calls_of_the_next_engine_wait_for_the_copies_of_the_last_one_and_are_answered() -> None:
    """They were taken by the machine that had left its group, or lost with it."""
    script = Script(2, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.hold_copies(0)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.engines[0].restart()
    number = script.engines[0].ask(Agree("next", True))
    script.pass_time(1.0)
    assert number not in script.engines[0].answers
    script.release_copies(0)
    script.wait(script.joined)
    script.ranks[1].register()
    script.engines[1].ask(Agree("next", True))
    script.wait(lambda: number in script.engines[0].answers)
    answer = script.engines[0].answers[number]
    assert isinstance(answer, Agreed)
    assert answer.outcome
    script.close()


def test_a_lease_that_shares_a_load_whose_copy_has_failed_here_is_told() -> None:
    """Only those that came before the end of the copy were."""
    script = Script(2)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.ranks[1].copy_weather.fail_share = 1.0
    first = script.acquire(A)
    second = script.acquire(A)
    for leases in (first, second):
        assert [bool(lease.error) for lease in leases] == [False, True]
        script.call(Release(leases[0].lease))
    script.settle()
    script.check_rest()


def test_the_slots_of_a_retracted_load_stay_with_its_lease_until_that_is_released() -> None:
    """They were free at the retraction, and handed out while the engine still read them."""
    script = Script(2, device=8)
    script.cache(A)
    script.call(Evict(Tier.DEVICE, 4))
    script.ranks[1].copy_weather.fail_share = 1.0
    lease = script.acquire(A)[0]
    broken = [number for advanced in script.settle() for number in advanced.broken]
    assert broken == [lease.lease]
    taken = script.call(Allocate(4))
    for allocated in taken:
        assert isinstance(allocated, Allocated)
        assert allocated.outcome
        assert not set(allocated.slots[0]) & set(lease.slots[0])
    assert not any(answer.outcome for answer in script.call(Allocate(1)) if isinstance(answer, Allocated))
    script.call(Release(lease.lease))
    script.settle()
    assert {rank.worker.cache.state.pools.free(Tier.DEVICE) for rank in script.ranks} == {4}


def test_a_load_back_that_was_waited_for_says_that_its_copy_has_failed() -> None:
    """The answer was the same as after a copy that had landed."""
    script = Script(2, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    script.ranks[0].copy_weather.fail_share = 1.0
    answers = script.call(LoadBack(join_keys(A), [[4, 5, 6, 7]], "load", landed=True))
    assert [answer.error for answer in answers if isinstance(answer, Loaded)] == ["copy_failed", ""]


def test_what_a_new_history_decides_while_old_copies_end_is_applied_afterwards() -> None:
    """It went into the cache of the old history, which was then thrown away."""
    script = Script(2, lockstep=False)
    for rank in script.ranks:
        rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
    script.hold_copies(0)
    script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
    script.engines[1].restart()
    script.pass_time(0.5)
    script.engines[1].ask(Agree("alone", True))
    script.pass_time(2.5)
    script.release_copies(0)
    script.pass_time(1.0)
    states = [rank.worker.cache.state for rank in script.ranks]
    assert len({state.digest.chain for state in states}) == 1
    assert states[0].digest.chain != 1


def test_calls_from_before_a_renewal_never_reach_the_new_history() -> None:
    """They waited until it was agreed what is kept, and were taken after the engine had registered again."""
    script = Script(2, model="m")
    script.cache(A)
    engine = script.engines[0]
    first, second = (engine.ask(Agree(name, True)) for name in ("first", "second"))
    script.engines[1].restart()
    script.wait(lambda: first in engine.answers)
    script.ranks[0].register()
    script.pass_time(0.1)
    for number in (first, second):
        answer = engine.answers[number]
        assert isinstance(answer, Failed)
        assert answer.error == "GroupRenewed"
    assert script.ranks[0].machine.stream.undecided() == []
    script.close()


def test_a_late_vote_of_the_engines_own_is_applied_once() -> None:
    """A rank that came to it after the decision applied it a second time, out of order."""
    script = Script(2, lockstep=False)
    script.engines[0].ask(Agree("early", False))
    script.pass_time(0.1)
    script.engines[1].ask(Agree("early", True))
    script.engines[0].ask(Agree("both", True))
    script.engines[1].ask(Agree("both", True))
    script.pass_time(0.1)
    script.check_rest()


def test_ranks_that_would_stop_at_different_limits_do_not_join() -> None:
    """One aborted an operation as one too many, the others covered it."""
    script = Script(2, joined=False)
    config = script.world.shape.worker_config(1)
    limits = msgspec.structs.replace(config.limits, operations_open_max=3)
    script.ranks[1]._config = msgspec.structs.replace(config, limits=limits)
    script.pass_time(8.0)
    failure = next(rank.worker.failure for rank in script.ranks if rank.worker.failure is not None)
    assert failure.error == "JoinRefused"
    assert failure.fields[2] == "limits.operations_open_max"


def test_no_answer_is_an_invariant_broken() -> None:
    """What an engine gets wrong is its own error."""
    script = Script(1)
    for call in (Release(99), Acquire(b"short"), Advance(7), Allocate(-1)):
        (answer,) = script.call(call)
        assert not isinstance(answer, Acquired)
        if isinstance(answer, Failed):
            assert answer.error != InvariantBroken.__name__
