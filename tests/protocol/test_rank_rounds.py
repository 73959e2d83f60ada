import pytest

from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.errors import UsageError
from kvcoord.protocol.messages import Ack, Decision, Frame, Verdict, Vote
from kvcoord.protocol.rank_rounds import RankRounds

VOTE = Vote("op", OperationKind.CUSTOM, True)


def verdict(number: int, *decisions: Decision, absent: tuple[int, ...] = ()) -> Verdict:
    return Verdict(1, number, list(decisions), [], [8], list(absent))


def frame(rounds: RankRounds, number: int) -> Frame:
    return rounds.frame(1, number, [8], 0, 0.0)


def test_a_rank_is_never_more_than_lag_rounds_ahead() -> None:
    rounds = RankRounds(2)
    frame(rounds, 5)
    frame(rounds, 6)
    with pytest.raises(UsageError, match="verdict 5"):
        frame(rounds, 7)
    assert rounds.take(verdict(5))
    frame(rounds, 7)


def test_steps_follow_each_other() -> None:
    rounds = RankRounds(2)
    frame(rounds, 5)
    with pytest.raises(UsageError, match="the next one is 6"):
        frame(rounds, 7)


def test_no_verdict_is_due_before_the_first_round_plus_lag() -> None:
    rounds = RankRounds(2)
    assert rounds.due(4) is None
    frame(rounds, 5)
    assert [rounds.due(step) for step in (5, 6, 7, 8)] == [None, None, 5, 6]


def test_verdicts_are_taken_in_order_and_once() -> None:
    rounds = RankRounds(2)
    assert not rounds.take(verdict(5))
    frame(rounds, 5)
    frame(rounds, 6)
    assert not rounds.take(verdict(6))
    assert rounds.take(verdict(5))
    assert not rounds.take(verdict(5))
    assert rounds.take(verdict(6))
    assert rounds.ignored == {"verdict_after_gap": 2, "verdict_repeated": 1}


def test_what_is_kept_is_enough_for_the_slowest_rank_and_no_more() -> None:
    lag = 2
    rounds = RankRounds(lag)
    for step in range(50):
        if rounds.due(step) is not None:
            assert rounds.verdict(step - lag) is not None
        frame(rounds, step)
        rounds.take(verdict(step))
        kept = [kept.round for kept in rounds.kept()]
        assert kept[-1] == step
        assert len(kept) <= 2 * lag + 1
        assert min(kept) <= max(0, step - lag)


def test_the_oldest_frame_without_a_verdict_is_said_again() -> None:
    rounds = RankRounds(2)
    first = rounds.frame(1, 0, [8], 0, 10.0)
    rounds.frame(1, 1, [8], 0, 10.2)
    assert rounds.overdue(10.4, 0.5) is None
    assert rounds.overdue(10.5, 0.5) == first
    assert rounds.overdue(10.9, 0.5) is None
    rounds.take(verdict(0))
    again = rounds.overdue(11.0, 0.5)
    assert again is not None
    assert again.round == 1


def test_frames_go_out_unchanged_in_the_new_epoch() -> None:
    rounds = RankRounds(3)
    rounds.defer(VOTE)
    rounds.ack(Ack("copied", True))
    sent = [frame(rounds, number) for number in range(3)]
    resent = rounds.resend(9, 0, 1.0)
    assert [(again.epoch, again.round) for again in resent] == [(9, 1), (9, 2)]
    assert [again.votes for again in resent] == [before.votes for before in sent[1:]]


def test_a_vote_that_no_verdict_has_decided_goes_into_the_next_frame_of_the_new_epoch() -> None:
    rounds = RankRounds(2)
    rounds.defer(VOTE)
    frame(rounds, 0)
    rounds.take(verdict(0, absent=(1,)))
    rounds.resend(9, 0, 1.0)
    assert frame(rounds, 1).votes == [VOTE]


def test_a_vote_that_was_decided_is_not_said_again() -> None:
    rounds = RankRounds(2)
    rounds.defer(VOTE)
    frame(rounds, 0)
    rounds.take(verdict(0, Decision("op", Outcome.COMMIT)))
    rounds.resend(9, 0, 1.0)
    assert frame(rounds, 1).votes == []


def test_an_ack_that_is_given_twice_is_said_once() -> None:
    rounds = RankRounds(1)
    rounds.ack(Ack("op", True))
    rounds.ack(Ack("op", True))
    assert frame(rounds, 0).acks == [Ack("op", True)]


def test_a_rank_that_learns_of_a_closed_round_before_its_own_frame_goes_on() -> None:
    """After a change of coordinator. Its frame stayed open for ever, and it could not take the step after the next."""
    rounds = RankRounds(1)
    frame(rounds, 0)
    aborted = Decision("decided", Outcome.ABORT, 0, None, Reason.VOTE_TIMEOUT, 1)
    assert rounds.take(verdict(0))
    assert rounds.take(verdict(1, aborted, absent=(1,)))
    rounds.defer(vote_for("decided"))
    rounds.defer(VOTE)
    rounds.ack(Ack("copied", True))
    late = frame(rounds, 1)
    assert (late.votes, late.acks) == ([], [])
    assert rounds.overdue(100.0, 0.5) is None
    following = frame(rounds, 2)
    assert following.votes == [VOTE]
    assert following.acks == [Ack("copied", True)]


def vote_for(operation: str) -> Vote:
    return Vote(operation, OperationKind.CUSTOM, True)
