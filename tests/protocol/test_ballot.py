from hypothesis import given
from hypothesis import strategies as st

from kvcoord.domain import Agreement, OperationKind, Reason
from kvcoord.protocol.ballot import Ballot, Tally, participants_of, ranks_in
from kvcoord.protocol.messages import Value, Vote

EVERYONE = 0b1111


def yes(agreement: Agreement = Agreement.ALL, value: Value = None, participants: int = 0) -> Vote:
    return Vote("op", OperationKind.CUSTOM, True, agreement, participants, value)


def no(reason: Reason = Reason.BUSY, **shortfall: int) -> Vote:
    return Vote("op", OperationKind.CUSTOM, False, reason=reason, shortfall=shortfall)


def tally(votes: list[tuple[int, Vote]]) -> Ballot:
    ballot = Ballot(votes[0][1], EVERYONE)
    for rank, vote in votes:
        ballot.record(rank, vote)
    return ballot


def outcome(ballot: Ballot) -> tuple[bool, bool, Value]:
    return ballot.refused, ballot.complete, None if ballot.refused else ballot.value


@st.composite
def four_votes(draw: st.DrawFn) -> list[tuple[int, Vote]]:
    """One vote from each of four ranks on one agreement; now and then a no, or a value that is not of the kind."""
    agreement = draw(st.sampled_from(list(Agreement)))
    if agreement is Agreement.ALL:
        values: st.SearchStrategy[Value] = st.none()
    elif agreement is Agreement.INTERSECT:
        values = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6)
    else:
        values = st.integers(0, 3)
    odd: st.SearchStrategy[Value] = st.sampled_from([None, 1, [b"a"]])
    vote = st.builds(yes, st.just(agreement), st.one_of(values, values, values, odd))
    return [(rank, draw(st.one_of(vote, vote, vote, st.just(no())))) for rank in range(4)]


@given(four_votes(), st.randoms(use_true_random=False))
def test_the_order_of_votes_never_changes_outcome_or_value(votes: list[tuple[int, Vote]], random: object) -> None:
    shuffled = list(votes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = [vote for _, vote in votes if vote.yes]
    if not first:
        return
    assert outcome(tally(shuffled)) == outcome(tally(votes))


@given(four_votes(), st.lists(st.integers(0, 3), max_size=6))
def test_votes_that_come_twice_change_nothing(votes: list[tuple[int, Vote]], again: list[int]) -> None:
    repeated = list(votes)
    for rank in again:
        repeated.insert(rank + 1, votes[rank])
    assert outcome(tally(repeated)) == outcome(tally(votes))


@given(four_votes(), st.integers(0, 3))
def test_it_is_complete_only_when_each_participant_has_voted(votes: list[tuple[int, Vote]], absent: int) -> None:
    present = [(rank, vote) for rank, vote in votes if rank != absent]
    ballot = tally(present + present)
    assert not ballot.complete
    assert ballot.missing() == [absent]


def test_a_duplicate_vote_never_stands_in_for_an_absent_rank() -> None:
    ballot = Ballot(yes(), 0b11)
    assert ballot.record(0, yes()) is Tally.RECORDED
    assert ballot.record(0, yes()) is Tally.DUPLICATE
    assert not ballot.complete


def test_a_second_other_vote_of_a_rank_is_named_and_ignored() -> None:
    ballot = tally([(0, yes())])
    assert ballot.record(0, no()) is Tally.CONFLICTING
    assert not ballot.refused


def test_blame_is_the_first_no_with_the_largest_shortfall_of_all() -> None:
    ballot = tally([(2, no(Reason.HOST_FULL, kv=3, index=1)), (0, no(Reason.BUSY, kv=5)), (1, yes())])
    assert ballot.blame() == (Reason.HOST_FULL, 2, {"kv": 5, "index": 1})


def test_who_is_not_asked_has_no_vote() -> None:
    ballot = Ballot(yes(participants=0b0010), EVERYONE)
    assert ballot.record(0, yes(participants=0b0010)) is Tally.NOT_PARTICIPANT
    assert ballot.record(1, yes(participants=0b0010)) is Tally.RECORDED
    assert ballot.complete


def test_ranks_that_name_other_participants_do_not_commit() -> None:
    ballot = tally([(0, yes(participants=0b0011)), (2, yes(participants=0b0111))])
    assert ballot.refused
    assert ballot.blame() == (Reason.UNEQUAL, 2, {})


def test_all_ranks_may_be_named_one_by_one_or_by_none() -> None:
    ballot = tally([(0, yes()), *((rank, yes(participants=EVERYONE)) for rank in (1, 2, 3))])
    assert not ballot.refused
    assert ballot.complete


@given(st.integers(0, 1 << 70))
def test_masks_name_ranks(mask: int) -> None:
    assert sum(1 << rank for rank in ranks_in(mask)) == mask
    assert participants_of(mask, EVERYONE) == ((mask & EVERYONE) or EVERYONE)
