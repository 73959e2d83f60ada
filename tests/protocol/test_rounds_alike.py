"""Rounds in which all ranks vote alike are decided without counting ballots, and just as ballots would decide them."""

from hypothesis import given
from hypothesis import strategies as st

from kvcoord.domain import Agreement, OperationKind, Reason
from kvcoord.protocol.messages import Decision, Frame, Vote
from kvcoord.protocol.rounds import RoundTable
from kvcoord.protocol.transfers import TransferTable

RANKS = 3
EVERYONE = (1 << RANKS) - 1
OPEN_MAX = 3


def votes() -> st.SearchStrategy[Vote]:
    agreement = st.sampled_from([Agreement.ALL, Agreement.ALL, Agreement.ALL, Agreement.MIN])
    kind = st.sampled_from([OperationKind.CUSTOM, OperationKind.WRITE_THROUGH])
    participants = st.sampled_from([0, 0, EVERYONE, 0b011])
    yes = st.sampled_from([True, True, True, False])
    return st.builds(_vote, st.sampled_from("abcd"), kind, yes, agreement, participants)


def _vote(name: str, kind: OperationKind, yes: bool, agreement: Agreement, participants: int) -> Vote:
    value = 7 if agreement is Agreement.MIN else None
    reason = None if yes else Reason.HOST_FULL
    return Vote(name, kind, yes, agreement, participants, value, reason)


def decided(by_rank: list[list[Vote]], *, ballots: bool) -> tuple[list[Decision], int, dict[str, int]]:
    """The decisions of one round, the copies that it opened, and what it ignored."""
    transfers = TransferTable(EVERYONE, 30.0, 64)
    table = RoundTable(RANKS, transfers, 10.0, 8, OPEN_MAX)
    if ballots:
        table._alike = lambda frames: None  # type: ignore[method-assign]
    for rank, said in enumerate(by_rank):
        table.frame(rank, Frame(1, 0, said, [], [9], 0, 0), 0.0)
    ((verdict, _),) = table.close_ready(1, 0.0)
    return verdict.decisions, len(transfers), table.ignored


@given(st.lists(votes(), max_size=6))
def test_ranks_that_vote_alike_are_decided_as_by_ballots(said: list[Vote]) -> None:
    by_rank = [list(said) for _ in range(RANKS)]
    assert decided(by_rank, ballots=False) == decided(by_rank, ballots=True)


@given(st.lists(st.lists(votes(), max_size=4), min_size=RANKS, max_size=RANKS))
def test_ranks_that_vote_differently_are_decided_as_by_ballots(by_rank: list[list[Vote]]) -> None:
    assert decided(by_rank, ballots=False) == decided(by_rank, ballots=True)


def test_ranks_that_all_say_yes_open_no_ballot() -> None:
    said = [_vote(name, OperationKind.WRITE_THROUGH, True, Agreement.ALL, 0) for name in "abc"]
    table = RoundTable(RANKS, TransferTable(EVERYONE, 30.0, 64), 10.0, 8)
    frames = [(rank, Frame(1, 0, list(said), [], [9], 0, 0)) for rank in range(RANKS)]
    assert table._alike(frames) == said
