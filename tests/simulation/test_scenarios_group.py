"""Scenarios from the field that are about the group: O to U, with the fault at each phase."""

import msgspec
import pytest

from kvcoord.controller import assembly
from kvcoord.domain import Committed, OperationKind, Outcome, Path, Tier
from kvcoord.index.keys import self_test_digest
from kvcoord.protocol.local import Acquire, Acquired, Agree, Agreed, Evict, Failed, WriteThrough, join_keys
from kvcoord.simulation.network import Envelope
from tests.simulation.phases import PHASES, begin_anew, go_on
from tests.simulation.scripted import CORNERS, ODD_RANKS, SHAPES, Script, pages

A = pages(1, 2, 3, 4)

_DOWN_S = (0.3, 5.0)
"""Shorter than a heartbeat may be late, and longer."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tp", "pp", "odd", "down_s"), [(*sweep, _DOWN_S[n % 2]) for n, sweep in enumerate(CORNERS)])
def test_scenario_o_a_rank_killed_at_any_phase_comes_back(
    tp: int, pp: int, odd: int, down_s: float, phase: str
) -> None:
    """Every call of the others is answered, none hangs."""
    script = Script(tp, pp, host=12)
    PHASES[phase](script, odd)
    rank = script.ranks[odd]
    rank.crash()
    others = [engine for number, engine in enumerate(script.engines) if number != odd]
    waiting = [engine.ask(Acquire(join_keys(pages(91)))) for engine in others]
    script.pass_time(down_s)
    rank.boot()
    go_on(script)
    for engine, number in zip(others, waiting, strict=True):
        answer = engine.answers[number]
        assert isinstance(answer, Acquired) or (isinstance(answer, Failed) and answer.error == "GroupRenewed")
    begin_anew(script)


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_o_ranks_without_traffic_stay_members(tp: int, pp: int) -> None:
    """Ten times the liveness timeout without an operation."""
    script = Script(tp, pp)
    epochs = {rank.machine.epoch for rank in script.ranks}
    script.pass_time(10 * script.world.shape.timeouts.heartbeat_timeout_s)
    script.cache(A)
    assert {rank.machine.epoch for rank in script.ranks} == epochs
    script.check_rest()


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_p_a_coordinator_killed_at_any_phase_changes_no_outcome(
    tp: int, pp: int, phase: str, standby: bool
) -> None:
    """What was agreed stays agreed, no cached page is lost, the steps go on."""
    script = Script(tp, pp, host=16, coordinators=2 if standby else 1)
    script.cache(pages(81, 82))
    PHASES[phase](script, 0)
    coordinator = script.world.coordinators[0]
    coordinator.crash()
    script.pass_time(0.5)
    if not standby:
        coordinator.boot()
    for rank in script.everyone:
        script.ranks[rank].copy_weather.stuck = 0
        script.ranks[rank].release_held()
    script.wait(script.joined)
    assert {rank.worker.renewals for rank in script.ranks} == {0}
    assert {rank.machine.coordinator_index for rank in script.ranks} == {int(standby)}
    script.wait(lambda: not any(engine.asked for engine in script.engines))
    script.settle()
    assert {script.resident(rank, pages(81, 82), Tier.HOST) for rank in script.everyone} == {2}
    script.check_rest()


KINDS = ["Hello", "Prepare", "Accept", "Activate", "Frame", "Verdict", "StreamVote", "Numbered", "StreamAck"]


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_scenario_q_the_first_message_of_any_kind_may_be_lost(ranks: int, kind: str, lockstep: bool) -> None:
    script = Script(ranks, lockstep=lockstep, joined=False)
    lost: set[int] = set()

    def lose(envelope: Envelope) -> bool:
        if type(envelope.message).__name__ != kind or envelope.rank in lost:
            return False
        lost.add(envelope.rank)
        return True

    script.world.network.lose = lose
    script.wait(script.joined)
    if lockstep:
        script.cache(A)
    else:
        for rank in script.ranks:
            rank.memory.fill(Tier.DEVICE, [[0, 1, 2, 3]], A)
        script.call(WriteThrough(keys=join_keys(A), slots=[[0, 1, 2, 3]], operation="write"))
        script.wait(lambda: not any(rank.worker.cache.open_count() for rank in script.ranks))
    answers = script.call(Agree("last", True))
    assert all(isinstance(answer, Agreed) and answer.outcome for answer in answers)
    script.check_rest()


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_scenario_q_messages_that_come_twice_or_in_another_order_change_nothing(ranks: int, share: float) -> None:
    script = Script(ranks)
    for rank in script.everyone:
        for way in ("up", "down"):
            weather = script.world.network.weather(way, rank, 0)  # type: ignore[arg-type]
            weather.repeated, weather.disorder_s = share, 0.05
    for turn in range(5):
        script.cache(pages(10 * turn + 1, 10 * turn + 2, 10 * turn + 3))
    script.check_rest()


def test_scenario_q_in_a_hundred_fresh_starts_the_first_operation_is_decided_on_all_ranks() -> None:
    """It is asked for before the group has come together: no message of the start is taken for granted."""
    for seed in range(100):
        script = Script(2, lockstep=False, joined=False, seed=seed)
        script.wait(lambda script=script: all(rank.alive for rank in script.ranks))  # type: ignore[misc]
        answers = script.call(Agree("first", True))
        assert [answer.outcome for answer in answers if isinstance(answer, Agreed)] == [
            Committed("first", Path.IMMEDIATE)
        ] * 2
        script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_scenario_r_a_rank_that_leaves_is_missed_at_once(tp: int, pp: int, odd: int) -> None:
    """The others need not wait for the silence."""
    script = Script(tp, pp)
    before = script.ranks[0].machine.epoch
    script.engines[odd].restart()
    script.pass_time(0.1)
    assert script.joined()
    assert min(rank.machine.epoch for rank in script.ranks) > before
    begin_anew(script)


@pytest.mark.parametrize(("tp", "pp", "odd"), [sweep for sweep in ODD_RANKS if sweep[:2] != (1, 1)])
def test_scenario_s_a_rank_that_cannot_register_its_memory_never_joins_and_is_named(tp: int, pp: int, odd: int) -> None:
    """Its process ends before it says Hello; the others wait for it by name, and go on once it has come."""
    script = Script(tp, pp, joined=False)
    rank = script.ranks[odd]
    boot = rank.boot
    rank.boot = lambda: None  # type: ignore[method-assign]
    script.pass_time(5.0)
    for other in script.ranks:
        assert other is rank or other.machine.cause == f"waiting for ranks {odd}"
    boot()
    script.wait(script.joined)
    script.cache(A)
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), CORNERS[1:])
def test_scenario_s_a_group_that_stays_incomplete_is_lost_by_name(tp: int, pp: int, odd: int) -> None:
    script = Script(tp, pp, joined=False)
    script.ranks[odd].boot = lambda: None  # type: ignore[method-assign]
    script.pass_time(1.0)
    others = [engine for number, engine in enumerate(script.engines) if number != odd]
    script.world.failures_allowed.add("GroupLost")
    numbers = [engine.ask(Acquire(join_keys(A))) for engine in others]
    script.pass_time(script.world.shape.timeouts.join_timeout_s + 5.0)
    for engine, number in zip(others, numbers, strict=True):
        answer = engine.answers[number]
        assert isinstance(answer, Failed)
        assert answer.error == "GroupLost"
        assert str(odd) in str(answer.fields[1]).removeprefix("waiting for ranks ").split(",")


@pytest.mark.parametrize(("tp", "pp", "odd"), [sweep for sweep in ODD_RANKS if sweep[:2] != (1, 1)])
def test_scenario_t_a_rank_whose_keys_would_differ_is_refused_with_both_values(tp: int, pp: int, odd: int) -> None:
    script = Script(tp, pp, joined=False)
    rank = script.ranks[odd]
    group = msgspec.structs.replace(script.world.shape.group, page_tokens=128)
    config = msgspec.structs.replace(script.world.shape.worker_config(odd), group=group)
    rank._config = config
    script.world.failures_allowed.add("JoinRefused")
    script.pass_time(8.0)
    refused = [one.worker.failure for one in script.ranks if one.worker.failure is not None]
    assert refused
    for failure in refused:
        assert failure.error == "JoinRefused"
        assert failure.fields[2] == "page_tokens"
        assert {failure.fields[4], failure.fields[6]} == {64, 128}


@pytest.mark.parametrize(("tp", "pp", "odd"), CORNERS[1:])
def test_scenario_t_a_rank_that_makes_other_keys_of_the_same_tokens_is_refused(
    tp: int, pp: int, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tp, pp, joined=False)
    rank = script.ranks[odd]
    boot = rank.boot

    def boot_with_other_keys() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(assembly, "self_test_digest", lambda: "other")
            boot()

    rank.boot = boot_with_other_keys  # type: ignore[method-assign]
    script.world.failures_allowed.add("JoinRefused")
    script.pass_time(8.0)
    refused = [one.worker.failure for one in script.ranks if one.worker.failure is not None]
    assert refused
    for failure in refused:
        assert (failure.error, failure.fields[2]) == ("JoinRefused", "page_key_self_test")
        assert {failure.fields[4], failure.fields[6]} == {self_test_digest(), "other"}


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_scenario_u_numbers_are_counted_for_the_group_and_are_the_same_on_all_ranks(tp: int, pp: int) -> None:
    """Ten loads of four pages, and one abort."""
    script = Script(tp, pp, device=8, host=8)
    script.cache(A)
    for _ in range(10):
        script.call(Evict(Tier.DEVICE, 8))
        lease = script.acquire(A)[0]
        assert lease.host_pages == 4
        script.settle()
        script.write(lease.lease)
        script.settle()
    assert not script.acquire(pages(*range(30, 40)))[0].outcome
    counted = [rank.worker.cache.state.counters for rank in script.ranks]
    for counters in counted:
        loads = sum(n for key, n in counters.decisions.items() if key[0] is OperationKind.LOAD_BACK)
        aborts = sum(n for key, n in counters.decisions.items() if key[2] is Outcome.ABORT)
        assert (loads, counters.pages_hit[Tier.HOST], aborts) == (10, 40, 1)
        assert all(path in Path for _, path, _, _ in counters.decisions)
    assert len({str(counters.decisions) for counters in counted}) == 1
    script.check_rest()
