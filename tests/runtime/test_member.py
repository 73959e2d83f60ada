"""A group member inside an engine: real sockets, real threads, and an engine thread that never waits for either."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcoord.config import WorkerConfig
from kvcoord.config.group import GroupConfig
from kvcoord.config.timeouts import Timeouts
from kvcoord.domain import Agreement, OperationKind, Outcome, Reason
from kvcoord.errors import Diverged, GroupLost, JoinRefused, UsageError
from kvcoord.protocol.messages import Ack, Vote
from kvcoord.runtime.member import Member
from tests.runtime.process_group import PATIENT

Engine = Callable[[Member, int], Any]


@pytest.fixture(params=["ipc", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the members meet: over ZeroMQ, driven by their own threads, or over a link that their engines drive."""
    return f"{request.param}://{tmp_path}/c.sock"


def member(address: str, rank: int, world_size: int, *, timeouts: Timeouts | None = None, **settings: Any) -> Member:
    config = WorkerConfig(
        group=GroupConfig(name="g", world_size=world_size, tp=world_size),
        rank=rank,
        coordinators=[address],
        embed_coordinator=True,
        timeouts=timeouts or PATIENT,
    )
    return Member(config, {"pools": "host", **settings}, events=lambda: [("event", rank)])


def on_threads(address: str, engine: Engine, *, ranks: int = 2, **options: Any) -> list[Any]:
    """Runs `engine` on a thread for each rank. What it raises is its result."""
    results: list[Any] = [None] * ranks
    members = [member(address, rank, ranks, **options) for rank in range(ranks)]
    last = threading.Barrier(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = engine(members[rank], rank)
        except Exception as error:
            results[rank] = error
        last.wait()
        members[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def step(one: Member, number: int, *said: Vote | Ack, digest: int = 1) -> None:
    votes = [item for item in said if isinstance(item, Vote)]
    one.send(number, [10], digest, votes, [item for item in said if isinstance(item, Ack)])


def test_joining_returns_the_smallest_free_count_of_all_ranks(address: str) -> None:
    assert on_threads(address, lambda one, rank: list(one.open([10 + rank]))) == [[10], [10]]


def test_a_verdict_says_what_all_ranks_voted_and_acked(address: str) -> None:
    def engine(one: Member, rank: int) -> Any:
        one.open([10])
        kind = OperationKind.WRITE_THROUGH
        refused = Vote("b", kind, False, reason=Reason.HOST_FULL, shortfall={"host": 3 + rank})
        step(one, 0, Vote("a", kind, True), refused if rank else Vote("b", kind, True))
        first = one.take(0)
        step(one, 1, Ack("a", True))
        second = one.take(1)
        decided = [(decision.operation, decision.outcome, decision.shortfall) for decision in first.decisions]
        return decided, [completion.operation for completion in second.completions]

    expected = [("a", Outcome.COMMIT, {}), ("b", Outcome.ABORT, {"host": 4})], ["a"]
    assert on_threads(address, engine) == [expected, expected]


def test_an_immediate_vote_is_decided_by_the_smallest_value(address: str) -> None:
    def engine(one: Member, rank: int) -> Any:
        one.open([10])
        decision = one.decide(Vote("length", OperationKind.CUSTOM, True, Agreement.MIN, value=7 + rank))
        return decision.outcome, decision.value

    assert on_threads(address, engine) == [(Outcome.COMMIT, 7)] * 2


def test_a_verdict_is_handed_out_once_and_a_hundred_steps_need_no_more_than_one_each(address: str) -> None:
    def engine(one: Member, _: int) -> Any:
        one.open([10])
        for number in range(100):
            step(one, number)
            assert one.take(number).round == number
        return len(one._board.verdicts)

    assert on_threads(address, engine, ranks=3) == [0, 0, 0]


def test_different_digests_raise_on_every_rank_and_name_the_sides(address: str) -> None:
    def engine(one: Member, rank: int) -> None:
        one.open([10])
        for number in range(50):
            step(one, number, digest=rank)
            one.take(number)

    for error in on_threads(address, engine):
        assert isinstance(error, Diverged)
        assert error.sides == [[0], [1]]


def test_different_settings_refuse_the_join_by_name(address: str) -> None:
    members = [member(address, rank, 2, page_size=64 + rank) for rank in range(2)]
    errors: list[Exception] = []

    def run(one: Member) -> None:
        try:
            one.open([10])
        except JoinRefused as error:
            errors.append(error)
            for other in members:
                other._board.fail(GroupLost("g", "the test is over", 0.0))
        except GroupLost:
            pass

    threads = [threading.Thread(target=run, args=(one,)) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in reversed(members):
        one.close()
    assert errors
    assert "page_size" in str(errors[0])


def test_ranks_that_never_come_end_the_join_with_their_names(address: str) -> None:
    timeouts = msgspec.structs.replace(PATIENT, join_timeout_s=2.0)
    alone = member(address, 0, 2, timeouts=timeouts)
    with pytest.raises(GroupLost, match="1"):
        alone.open([10])
    alone.close()


def test_a_rank_that_is_gone_ends_the_wait_of_the_other_within_the_deadline(address: str) -> None:
    timeouts = msgspec.structs.replace(PATIENT, group_deadline_s=0.5)

    def engine(one: Member, rank: int) -> Any:
        one.open([10])
        if rank == 1:
            one.close()
            return None
        step(one, 0)
        return one.take(0)

    first, _ = on_threads(address, engine, timeouts=timeouts)
    assert isinstance(first, GroupLost)


def test_a_member_that_is_not_open_says_so(address: str) -> None:
    with pytest.raises(UsageError):
        step(member(address, 0, 1), 0)


def test_closing_is_harmless_before_opening_and_twice(address: str) -> None:
    one = member(address, 0, 1)
    one.close()
    one.open([10])
    one.close()
    one.close()
