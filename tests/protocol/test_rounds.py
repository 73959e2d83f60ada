import pytest

from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.protocol.messages import Ack, Decision, Frame, Verdict, Vote
from kvcoord.protocol.rounds import RoundTable
from kvcoord.protocol.transfers import TransferTable

EPOCH = 3


def table(ranks: int = 2, kept_max: int = 8, copying_max: int = 8) -> RoundTable:
    return RoundTable(ranks, TransferTable((1 << ranks) - 1, 30.0, 10), 10.0, kept_max, copying_max)


def frame(
    number: int, *votes: Vote, acks: tuple[Ack, ...] = (), digest: int = 1, free: int = 8, first: int = -1
) -> Frame:
    return Frame(EPOCH, number, list(votes), list(acks), [free], digest, first)


def yes(operation: str, participants: int = 0) -> Vote:
    return Vote(operation, OperationKind.WRITE_THROUGH, True, participants=participants)


def close(rounds: RoundTable, now: float = 0.0) -> list[Verdict]:
    return [verdict for verdict, _ in rounds.close_ready(EPOCH, now)]


def test_a_round_closes_with_the_last_frame_and_rounds_close_in_order() -> None:
    rounds = table()
    assert not rounds.frame(0, frame(4, first=4), 0.0)
    assert not rounds.frame(0, frame(5, first=4), 0.0)
    assert rounds.missing() == [1]
    assert not rounds.frame(1, frame(5), 0.0)
    assert close(rounds) == []
    assert rounds.frame(1, frame(4, digest=2), 0.0)
    assert [verdict.round for verdict in close(rounds)] == [4, 5]
    assert rounds.next_round == 6


def test_the_time_from_the_first_frame_of_a_round_to_its_verdict_is_counted() -> None:
    rounds = table()
    for number, seconds in ((0, 0.0005), (1, 0.0), (2, 30.0)):
        rounds.frame(0, frame(number, first=0), 7.0)
        rounds.frame(1, frame(number, first=0), 7.0 + seconds)
        close(rounds, 7.0 + seconds)
    times = rounds.close_times
    assert [count for bound, count in zip((*times.bounds_s, None), times.counts, strict=True) if count] == [1, 1, 1]
    assert times.counts[-1] == 1
    assert times.sum_s == pytest.approx(30.0005)


def test_the_first_round_is_the_one_that_ranks_began_with_and_not_the_first_to_come() -> None:
    """All first frames were lost, the second ones came: round 1 was closed, and round 0 could never be."""
    rounds = table()
    for rank in (0, 1):
        assert not rounds.frame(rank, frame(1, first=0), 0.0)
    assert close(rounds) == []
    for rank in (0, 1):
        rounds.frame(rank, frame(0, first=0), 1.0)
    assert [verdict.round for verdict in close(rounds)] == [0, 1]
    assert rounds.parting == {}


def test_a_verdict_is_the_same_whatever_order_frames_came_in() -> None:
    frames = [frame(0, yes("a"), yes("b"), free=3), frame(0, yes("b"), yes("a"), free=5)]
    verdicts = []
    for order in ((0, 1), (1, 0)):
        rounds = table()
        for rank in order:
            rounds.frame(rank, frames[rank], 0.0)
        verdicts += close(rounds)
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].capacity == [3]


def test_a_frame_that_comes_twice_does_not_stand_in_for_the_absent_rank() -> None:
    rounds = table()
    rounds.frame(0, frame(0), 0.0)
    assert not rounds.frame(0, frame(0), 0.0)
    assert close(rounds) == []
    assert rounds.ignored == {"frame_duplicate": 1}


def test_the_deadline_runs_from_the_first_frame_and_closing_clears_it() -> None:
    rounds = table()
    assert rounds.deadline() is None
    rounds.frame(0, frame(0, yes("a")), 2.0)
    assert rounds.deadline() == 12.0
    assert close(rounds, 11.9) == []
    (verdict,) = close(rounds, 12.0)
    assert (verdict.absent, verdict.capacity) == ([1], [0])
    assert verdict.decisions == [Decision("a", Outcome.ABORT, 0, None, Reason.VOTE_TIMEOUT, 1)]
    assert rounds.deadline() is None


def test_an_operation_that_only_late_ranks_voted_on_is_aborted_once() -> None:
    rounds = table(3)
    rounds.frame(0, frame(0), 0.0)
    close(rounds, 10.0)
    for rank in (1, 2, 2):
        rounds.frame(rank, frame(0, yes("own", 0b110)), 11.0)
    for rank in range(3):
        rounds.frame(rank, frame(1), 11.0)
    (verdict,) = close(rounds, 11.0)
    assert verdict.decisions == [Decision("own", Outcome.ABORT, 0, None, Reason.VOTE_TIMEOUT, 1)]


def test_acks_of_a_late_frame_count_in_the_next_round() -> None:
    rounds = table()
    rounds.frame(0, frame(0, acks=(Ack("op", True),)), 0.0)
    close(rounds, 10.0)
    rounds.frame(1, frame(0, acks=(Ack("op", True),)), 11.0)
    rounds.frame(0, frame(1), 11.0)
    rounds.frame(1, frame(1), 11.0)
    (verdict,) = close(rounds, 11.0)
    assert [(completion.operation, completion.ok) for completion in verdict.completions] == [("op", True)]


def test_late_digests_are_compared_when_all_are_there() -> None:
    rounds = table(3)
    rounds.frame(0, frame(0, digest=1), 0.0)
    close(rounds, 10.0)
    rounds.frame(1, frame(0, digest=2), 11.0)
    assert rounds.late_digests(0) is None
    rounds.frame(2, frame(0, digest=3), 11.0)
    assert rounds.late_digests(0) == {0: 1, 1: 2, 2: 3}
    assert rounds.late_digests(0) is None


def test_what_is_buffered_is_bounded_and_the_next_round_always_has_room() -> None:
    rounds = table(kept_max=4)
    rounds.frame(0, frame(0), 0.0)
    for number in range(2, 20):
        rounds.frame(0, frame(number), 0.0)
    assert rounds.ignored["frame_too_far_ahead"] == 15
    rounds.frame(1, frame(0), 0.0)
    assert len(close(rounds)) == 1
    rounds.frame(0, frame(1), 0.0)
    rounds.frame(1, frame(1), 0.0)
    assert [verdict.round for verdict in close(rounds)] == [1]


def test_copies_beyond_the_limit_are_aborted() -> None:
    rounds = table(1, copying_max=1)
    rounds.frame(0, frame(0, yes("a"), yes("b")), 0.0)
    (verdict,) = close(rounds)
    assert [decision.reason for decision in verdict.decisions] == [None, Reason.LIMIT]


def test_ranks_that_begin_at_different_rounds_are_told_apart_at_once() -> None:
    rounds = table(3)
    rounds.frame(0, frame(8, first=7), 0.0)
    assert rounds.parting == {}
    rounds.frame(1, frame(5, first=5), 0.0)
    assert rounds.parting == {0: 7, 1: 5}
    rounds.frame(2, frame(7, first=7), 0.0)
    assert rounds.parting == {0: 7, 1: 5, 2: 7}


def test_one_that_begins_at_another_round_after_the_first_has_closed_is_told_apart_too() -> None:
    rounds = table()
    rounds.frame(0, frame(7, first=7), 0.0)
    close(rounds, 10.0)
    rounds.frame(1, frame(0, first=0), 11.0)
    assert rounds.parting == {0: 7, 1: 0}


def test_a_rank_that_is_only_late_does_not_part() -> None:
    rounds = table()
    rounds.frame(0, frame(5), 0.0)
    close(rounds, 10.0)
    rounds.frame(1, frame(5), 11.0)
    assert rounds.parting == {}


def test_after_resuming_rounds_go_on_and_old_verdicts_can_be_asked_for() -> None:
    rounds = table()
    rounds.frame(0, frame(0), 0.0)
    rounds.resume(9, 4, [Verdict(EPOCH, 4, [], [], [8])])
    assert rounds.deadline() is None
    assert rounds.next_round == 5
    renewed = rounds.verdict(4)
    assert renewed is not None
    assert renewed.epoch == 9
    assert rounds.verdict(3) is None
