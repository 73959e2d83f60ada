import pytest

from kvcoord.domain import OperationKind, Outcome, Reason
from kvcoord.protocol.effects import Activated, Attach, GroupSuspended, Lost, RankEffect, SendUp
from kvcoord.protocol.messages import (
    Accept,
    Ack,
    Activate,
    Alive,
    Completion,
    Decision,
    FetchEntries,
    Heartbeat,
    Hello,
    LogRequest,
    Numbered,
    Prepare,
    Refused,
    Rejoin,
    StreamAck,
    StreamVote,
    Suspended,
    Verdict,
    Vote,
    epoch_id,
)
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine, RankState

FIRST, SECOND = epoch_id(1, 7), epoch_id(2, 7)
LIMITS = RankLimits()


def machine(coordinators: int = 1, *, lockstep: bool = False) -> RankMachine:
    who = Identity(group="g", rank=0, world_size=2, incarnation=5, fingerprint={})
    return RankMachine(who, coordinators, 1, LIMITS, lambda: [8], lockstep=lockstep)


def active(coordinators: int = 1, *, lockstep: bool = False) -> RankMachine:
    rank = machine(coordinators, lockstep=lockstep)
    rank.start(0.0)
    rank.receive(Prepare(FIRST, 1), 0.0)
    rank.receive(Activate(FIRST, FIRST, [], [], [8], -1), 0.0)
    assert rank.active
    return rank


def said(effects: list[RankEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendUp)]


def yes(operation: str) -> Vote:
    return Vote(operation, OperationKind.WRITE_THROUGH, True)


def decision(operation: str, sequence: int, epoch: int = FIRST) -> Numbered:
    return Numbered(epoch, Decision(operation, Outcome.COMMIT, sequence))


def test_a_lost_suspended_does_not_let_the_group_deadline_run_from_the_start() -> None:
    """A Prepare reached a rank that thought the group was working: it gave up at once, an hour after its start."""
    rank = active()
    rank.receive(Alive(FIRST, 7, 0), 3600.0)
    effects = rank.receive(Prepare(SECOND, 1), 3600.0)
    assert isinstance(effects[0], GroupSuspended)
    assert not any(isinstance(effect, Lost) for effect in rank.tick(3601.0))
    assert rank.state is RankState.ACCEPTED


def test_from_accept_on_nothing_older_is_taken() -> None:
    rank = active()
    rank.vote(yes("op"), 1.0)
    rank.receive(Suspended(FIRST, 1, "gone"), 1.0)
    accept = said(rank.receive(Prepare(SECOND, 1), 1.0))[0]
    assert isinstance(accept, Accept)
    assert accept.report.in_doubt == ["op"]
    assert rank.receive(decision("op", 1), 1.0) == []
    assert rank.receive(Activate(FIRST, FIRST, [], [], [8], -1), 1.0) == []
    assert rank.decided("op") is None


def test_late_words_of_the_former_epoch_are_not_heard_in_the_next() -> None:
    rank = active(lockstep=True)
    rank.frame(0, [8], 0, 1.0)
    rank.receive(Prepare(SECOND, 1), 1.0)
    rank.receive(Activate(SECOND, FIRST, [], [], [8], -1), 1.0)
    for late in (decision("op", 1), Verdict(FIRST, 0, [], [], [8]), Suspended(FIRST, 1, "gone")):
        assert rank.receive(late, 1.0) == []
    assert rank.active
    assert said(rank.receive(LogRequest(FIRST, 0), 1.0)) == []
    assert rank.receive(decision("op", 1, SECOND), 1.0) != []


def test_a_proposal_for_an_earlier_attachment_is_not_taken() -> None:
    rank = active()
    rank.receive(Rejoin(8), 1.0)
    assert rank.receive(Prepare(SECOND, 1), 1.0) == []
    assert said(rank.receive(Prepare(SECOND, 2), 1.0)) != []


def test_a_vote_is_immutable() -> None:
    rank = active()
    assert said(rank.vote(yes("op"), 1.0)) == [StreamVote(FIRST, yes("op"))]
    no = Vote("op", OperationKind.WRITE_THROUGH, False, reason=Reason.BUSY)
    assert rank.vote(no, 1.0) == []
    assert rank.vote(yes("op"), 1.0) == []
    assert rank.stream.ignored == {"vote_conflicting": 1, "vote_repeated": 1}
    again = [message for message in said(rank.tick(2.0)) if isinstance(message, StreamVote)]
    assert again == [StreamVote(FIRST, yes("op"))]


def test_a_vote_after_the_decision_is_not_sent() -> None:
    rank = active()
    rank.receive(decision("op", 1), 1.0)
    assert rank.vote(yes("op"), 1.0) == []
    assert rank.decided("op") == Decision("op", Outcome.COMMIT, 1)


def test_a_vote_put_between_accept_and_activation_is_sent_at_activation() -> None:
    rank = active()
    rank.vote(yes("before"), 1.0)
    rank.receive(Prepare(SECOND, 1), 1.0)
    rank.vote(yes("after"), 1.0)
    aborted = Decision("before", Outcome.ABORT, 1, None, Reason.IN_DOUBT)
    effects = rank.receive(Activate(SECOND, FIRST, [aborted], [], [8], -1), 1.0)
    assert said(effects) == [StreamVote(SECOND, yes("after"), 1)]


def test_a_gap_is_fetched_once_however_many_entries_follow_it() -> None:
    rank = active()
    assert said(rank.receive(decision("b", 2), 1.0)) == [FetchEntries(FIRST, 0)]
    assert rank.receive(decision("c", 3), 1.0) == []
    assert said(rank.receive(Alive(FIRST, 7, 3), 1.0)) == [FetchEntries(FIRST, 0)]


def test_an_ack_after_the_end_is_not_said() -> None:
    rank = active()
    rank.receive(Numbered(FIRST, Completion("op", True, True, 1)), 1.0)
    assert rank.ack(Ack("op", True), 1.0) == []


def test_an_ack_is_said_again_until_the_operation_is_drained() -> None:
    rank = active()
    rank.ack(Ack("op", True), 1.0)
    rank.receive(Numbered(FIRST, Completion("op", False, False, 1, Reason.COPY_FAILED, 1)), 1.0)
    assert StreamAck(FIRST, Ack("op", True), 1) in said(rank.tick(1.5))
    rank.receive(Numbered(FIRST, Completion("op", False, True, 2, Reason.COPY_FAILED, 1)), 2.0)
    assert not any(isinstance(message, StreamAck) for message in said(rank.tick(2.5)))


def test_a_new_history_forgets_what_was() -> None:
    rank = active(lockstep=True)
    rank.vote(yes("op"), 1.0)
    rank.ack(Ack("old", True), 1.0)
    rank.frame(40, [8], 0, 1.0)
    rank.receive(Prepare(SECOND, 1), 1.0)
    effects = rank.receive(Activate(SECOND, SECOND, [], [], [8], -1), 1.0)
    assert isinstance(effects[0], Activated)
    assert effects[0].fresh
    assert said(effects) == []
    frame = said(rank.frame(0, [8], 0, 1.0))[0]
    assert frame == rank.rounds.resend(SECOND, -1, 1.0)[0]
    assert said(rank.tick(2.0))[0] == Heartbeat(SECOND, 0)


def test_a_probe_is_answered_in_every_state_but_only_a_member_names_its_epoch() -> None:
    rank = machine()
    rank.start(0.0)
    assert said(rank.receive(Alive(0, 7, 0, 3), 0.0)) == [Heartbeat(0, 0, 3)]
    rank.receive(Prepare(FIRST, 1), 0.0)
    assert said(rank.receive(Alive(FIRST, 7, 0, 4), 0.0)) == [Heartbeat(0, 0, 4)]
    rank.receive(Activate(FIRST, FIRST, [], [], [8], -1), 0.0)
    assert said(rank.receive(Alive(FIRST, 7, 0, 5), 0.0)) == [Heartbeat(FIRST, 0, 5)]


def test_a_refusal_ends_a_rank_that_joins_and_not_one_that_works() -> None:
    refused = Refused("mismatch", "dtype", 0, "a", 1, "b")
    rank = active()
    assert rank.receive(refused, 1.0) == []
    rank.receive(Suspended(FIRST, 1, "gone"), 1.0)
    assert len(rank.receive(refused, 1.0)) == 1
    assert rank.state is RankState.REFUSED
    assert rank.deadline() is None
    assert rank.tick(100.0) == []


def test_a_broken_connection_is_made_again_at_once_but_not_in_a_busy_loop() -> None:
    rank = active(coordinators=2)
    rank.receive(Alive(FIRST, 7, 0), 10.0)
    rank.tick(10.0)
    assert isinstance(rank.gone(10.0)[0], GroupSuspended)
    assert rank.deadline() == 10.0
    assert rank.tick(10.0)[0] == Attach(0)
    rank.gone(10.0)
    assert rank.deadline() == 10.0 + LIMITS.heartbeat_interval_s
    assert rank.tick(10.1) == []


def test_a_rank_that_finds_nobody_tries_the_next_coordinator_at_once_and_takes_one_tour_an_interval() -> None:
    rank = active(coordinators=2)
    rank.receive(Alive(FIRST, 7, 0), 10.0)
    rank.gone(10.0)
    rank.tick(10.0)
    rank.absent(10.0)
    assert rank.tick(10.0)[0] == Attach(1)
    rank.absent(10.1)
    assert rank.tick(10.1) == []
    next_tour = 10.0 + LIMITS.heartbeat_interval_s
    assert rank.tick(next_tour)[0] == Attach(0)
    rank.absent(next_tour)
    assert rank.tick(next_tour)[0] == Attach(1)


def test_a_rank_with_one_coordinator_stays_there_when_nobody_answers() -> None:
    rank = active()
    rank.gone(10.0)
    assert rank.tick(10.0)[0] == Attach(0)
    rank.absent(10.0)
    assert not [effect for effect in rank.tick(10.6) if isinstance(effect, Attach)]


@pytest.mark.parametrize(
    ("coordinators", "moves"),
    [(1, []), (2, [(15.0, 1), (20.0, 0)]), (3, [(20.0, 1), (25.0, 2)])],
)
def test_a_rank_waits_for_the_others_longest_at_the_first_coordinator(
    coordinators: int, moves: list[tuple[float, int]]
) -> None:
    """Whoever waits elsewhere has time to come round while another waits at the first."""
    rank = machine(coordinators)
    rank.start(0.0)
    made: list[tuple[float, int]] = []
    while rank.state is RankState.JOINING:
        now = rank.deadline()
        assert now is not None
        made += [(now, effect.index) for effect in rank.tick(now) if isinstance(effect, Attach)]
        rank.receive(Alive(0, 7, 0), now)
    assert made == moves


def test_leaving_says_so_once_and_ends_everything() -> None:
    rank = active()
    assert len(rank.leave(1.0)) == 1
    assert rank.leave(1.0) == []
    assert rank.gone(1.0) == []
    assert rank.receive(Prepare(SECOND, 1), 1.0) == []
    assert rank.deadline() is None


def test_hello_says_what_was_accepted_and_counts_attachments() -> None:
    rank = active(coordinators=2)
    hello = said(rank.tick(LIMITS.heartbeat_timeout_s))[0]
    assert isinstance(hello, Hello)
    assert (hello.attach, hello.epoch) == (2, FIRST)
