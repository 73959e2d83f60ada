from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.protocol.messages import Completion, Decision, Vote
from kvcoord.protocol.stream import StreamTable
from kvcoord.protocol.transfers import TransferTable


def table(open_max: int = 10, kept_max: int = 10) -> StreamTable:
    return StreamTable(0b11, TransferTable(0b11, 30.0, 10), 5.0, open_max, kept_max)


def yes(operation: str, kind: OperationKind = OperationKind.CUSTOM) -> Vote:
    return Vote(operation, kind, True)


def test_deadlines_equal_to_now_have_passed() -> None:
    stream = table()
    stream.vote(0, yes("a"), 0.0)
    stream.vote(1, yes("b"), 0.0)
    stream.vote(0, yes("c"), 1.0)
    assert stream.deadline() == 5.0
    late = stream.expire(5.0)
    assert [(decision.operation, decision.reason, decision.rank) for decision in late] == [
        ("a", Reason.VOTE_TIMEOUT, 1),
        ("b", Reason.VOTE_TIMEOUT, 0),
    ]
    assert stream.deadline() == 6.0


def test_a_second_vote_does_not_move_the_deadline() -> None:
    stream = table()
    stream.vote(0, yes("a"), 0.0)
    stream.vote(0, yes("a"), 4.0)
    assert stream.deadline() == 5.0


def test_sequence_numbers_are_dense_over_decisions_and_completions() -> None:
    stream = table()
    first = stream.abort("a", Reason.BUSY, 0)
    second = stream.complete(Completion("b", True))
    third = stream.abort("c", Reason.BUSY, 0)
    assert [first.sequence, second.sequence, third.sequence] == [1, 2, 3]
    assert stream.after(0) == [first, second, third]
    assert stream.after(2) == [third]
    assert stream.after(3) == []


def test_what_is_no_longer_kept_is_not_made_up() -> None:
    stream = table(kept_max=2)
    for operation in "abc":
        stream.abort(operation, Reason.BUSY, 0)
    assert stream.after(0) is None
    kept = stream.after(1)
    assert kept is not None
    assert [entry.operation for entry in kept] == ["b", "c"]
    assert stream.decided("a") is None


def test_the_limit_counts_what_is_undecided_and_what_is_copied() -> None:
    stream = table(open_max=2)
    for rank in (0, 1):
        stream.vote(rank, yes("copied", OperationKind.WRITE_THROUGH), 0.0)
    assert stream.vote(0, yes("open"), 0.0) is None
    refused = stream.vote(0, yes("more"), 0.0)
    assert refused == Decision("more", Outcome.ABORT, 3 - 1, None, Reason.LIMIT, 0)
    committed = stream.vote(1, yes("open"), 0.0)
    assert committed is not None
    assert committed.outcome is Outcome.COMMIT


def test_a_vote_of_a_rank_that_does_not_take_part_opens_nothing() -> None:
    stream = table()
    assert stream.vote(0, Vote("a", OperationKind.CUSTOM, True, participants=0b10), 0.0) is None
    assert len(stream) == 0


def test_after_resuming_numbers_go_on_and_known_decisions_are_not_opened_again() -> None:
    stream = table()
    stream.vote(0, yes("open"), 0.0)
    known = Decision("a", Outcome.COMMIT, 7)
    stream.resume([known, Completion("a", True, True, 8)], 8)
    assert len(stream) == 0
    assert stream.vote(0, yes("a"), 0.0) is None
    assert stream.decided("a") == known
    assert stream.abort("b", Reason.IN_DOUBT, -1).sequence == 9


def test_an_operation_that_may_have_been_decided_and_forgotten_is_not_voted_on_again() -> None:
    """A vote that came late opened it anew, and it was decided a second time."""
    stream = table(kept_max=2)
    for number in range(4):
        stream.vote(0, Vote(f"op{number}", OperationKind.CUSTOM, False, reason=Reason.BUSY), 0.0)
    assert stream.decided("op0") is None
    assert not stream.votes_on("op0", 0)
    assert stream.votes_on("new", 2)
    stream.vote(0, yes("open"), 0.0)
    assert stream.votes_on("open", 0)
