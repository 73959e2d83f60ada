"""Failures from the field that are about the group: classes I, J, O to R, T, U, with the fault at each phase."""

from collections.abc import Callable

import msgspec
import pytest

from kvcoord.domain import OperationKind, Outcome, Path, Tier
from kvcoord.protocol.local import Acquire, Acquired, Advance, Agree, Agreed, Evict, Failed, WriteThrough, join_keys
from kvcoord.simulation.network import Envelope
from tests.simulation.scripted import ODD_RANKS, SHAPES, Script, pages

A = pages(1, 2, 3, 4)

PHASES: dict[str, Callable[[Script, int], None]] = {
    "idle": lambda script, odd: None,
    "before the vote": lambda script, odd: script.hold_copies(odd),
    "voted": lambda script, odd: _full_write(script),
    "copying": lambda script, odd: _copying(script, odd),
    "copied": lambda script, odd: _copied(script),
    "complete": lambda script, odd: _complete(script),
}
"""What the group is doing when the fault comes."""


def _full_write(script: Script) -> None:
    """More than fits: it is put to the vote of the next frame."""
    script.write(script.acquire(pages(*range(50, 67)))[0].lease)
    script.ask(Advance(script.step))
    script.step += 1


def _copying(script: Script, odd: int) -> None:
    script.hold_copies(odd)
    script.write(script.acquire(A)[0].lease)
    script.pass_time(0.05)


def _complete(script: Script) -> None:
    script.cache(A)


def _copied(script: Script) -> None:
    script.write(script.acquire(A)[0].lease)
    script.pass_time(0.1)


def go_on(script: Script) -> None:
    """Engines drop what they had where the group began anew, and the group works again."""
    for rank in script.everyone:
        script.ranks[rank].copy_weather.stuck = 0
        script.ranks[rank].release_held()
    script.wait(script.joined)
    script.wait(lambda: len({rank.machine.epoch for rank in script.ranks}) == 1)
    script.pass_time(1.0)
    for engine in script.engines:
        engine.asked.clear()
        engine.step, engine.index = 0, 0


def begin_anew(script: Script) -> None:
    """After a rank came back with nothing: every engine registers, and the steps begin at 0."""
    go_on(script)
    for rank in script.ranks:
        rank.register()
    script.step = 0
    script.cache(pages(71, 72))
    assert {script.resident(rank, pages(71, 72), Tier.HOST) for rank in script.everyone} == {2}
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4), (2, 4)])
def test_stages_take_note_of_a_completion_at_the_same_step(tp: int, pp: int) -> None:
    """Class I: the copies of each stage end at a time of their own."""
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
@pytest.mark.parametrize(("tp", "pp", "odd"), [(2, 1, 0), (2, 1, 1), (4, 1, 2), (2, 2, 3), (8, 1, 7)])
def test_an_engine_that_ends_at_any_phase_leaves_nothing_behind(tp: int, pp: int, odd: int, phase: str) -> None:
    """Class J."""
    script = Script(tp, pp, host=12)
    PHASES[phase](script, odd)
    script.engines[odd].restart()
    begin_anew(script)


@pytest.mark.parametrize("down_s", [0.3, 5.0])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tp", "pp", "odd"), [(2, 1, 0), (2, 1, 1), (4, 1, 3), (1, 4, 2), (8, 1, 0)])
def test_a_rank_killed_at_any_phase_comes_back(tp: int, pp: int, odd: int, phase: str, down_s: float) -> None:
    """Class O: every call of the others is answered, none hangs."""
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
def test_ranks_without_traffic_stay_members(tp: int, pp: int) -> None:
    """Class O: ten times the liveness timeout without an operation."""
    script = Script(tp, pp)
    epochs = {rank.machine.epoch for rank in script.ranks}
    script.pass_time(10 * script.world.shape.timeouts.heartbeat_timeout_s)
    script.cache(A)
    assert {rank.machine.epoch for rank in script.ranks} == epochs
    script.check_rest()


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2), (8, 1)])
def test_a_coordinator_killed_at_any_phase_changes_no_outcome(tp: int, pp: int, phase: str, standby: bool) -> None:
    """Class P: what was agreed stays agreed, no cached page is lost, the steps go on."""
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
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_message_of_any_kind_may_be_lost(ranks: int, kind: str, lockstep: bool) -> None:
    """Class Q."""
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
@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_that_come_twice_or_in_another_order_change_nothing(ranks: int, share: float) -> None:
    """Class Q."""
    script = Script(ranks)
    for rank in script.everyone:
        for way in ("up", "down"):
            weather = script.world.network.weather(way, rank, 0)  # type: ignore[arg-type]
            weather.repeated, weather.disorder_s = share, 0.05
    for turn in range(5):
        script.cache(pages(10 * turn + 1, 10 * turn + 2, 10 * turn + 3))
    script.check_rest()


@pytest.mark.parametrize(("tp", "pp", "odd"), ODD_RANKS)
def test_a_rank_that_leaves_is_missed_at_once(tp: int, pp: int, odd: int) -> None:
    """Class R: the others need not wait for the silence."""
    script = Script(tp, pp)
    before = script.ranks[0].machine.epoch
    script.engines[odd].restart()
    script.pass_time(0.1)
    assert script.joined()
    assert min(rank.machine.epoch for rank in script.ranks) > before
    begin_anew(script)


@pytest.mark.parametrize(("tp", "pp", "odd"), [sweep for sweep in ODD_RANKS if sweep[:2] != (1, 1)])
def test_a_rank_whose_keys_would_differ_is_refused_with_both_values(tp: int, pp: int, odd: int) -> None:
    """Class T."""
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


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_numbers_are_counted_for_the_group_and_are_the_same_on_all_ranks(tp: int, pp: int) -> None:
    """Class U: ten loads of four pages, and one abort."""
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
