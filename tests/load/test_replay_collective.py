"""Agreement by a collective: the peer that kvcoord is compared with must decide rightly, or the comparison is void."""

import pytest

from kvcoord.controller.operations import Operation
from kvcoord.controller.tiers import TierPools
from kvcoord.domain import Agreement, OperationKind, Outcome, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.load.collective import NONE, REASONS, CollectiveConsensus
from kvcoord.protocol.messages import Ack, Vote

FULL = REASONS.index(Reason.HOST_FULL)


class Others:
    """The other rank: says what it was told to say, and counts collectives."""

    def __init__(self) -> None:
        self.says: list[list[int]] = []
        self.heard: list[list[int]] = []

    def minimum(self, numbers: list[int]) -> list[int]:
        self.heard.append(numbers)
        said = self.says.pop(0) if self.says else [NONE] * len(numbers)
        return [min(pair) for pair in zip(numbers, said, strict=True)]


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def consensus(others: Others) -> CollectiveConsensus:
    return CollectiveConsensus(TierPools(["kv"], 10, 8), 1, others.minimum)


def started(consensus: CollectiveConsensus, count: int) -> list[str]:
    operations = [Operation(OperationKind.WRITE_THROUGH, serial, 0, Tier.HOST, [], []) for serial in range(count)]
    consensus.operations = {operation.id: operation for operation in operations}
    return list(consensus.operations)


def test_the_least_free_pool_counts_and_is_asked_for_once_a_decision(
    consensus: CollectiveConsensus, others: Others
) -> None:
    others.says = [[5]]
    assert [consensus.available(Tier.HOST), consensus.available(Tier.HOST)] == [5, 5]
    consensus.credit(Tier.HOST, 2)
    assert consensus.available(Tier.HOST) == 7
    consensus.issue(Tier.HOST, 7)
    assert consensus.available(Tier.HOST) == 8
    assert others.heard == [[8], [8]]


def test_a_new_step_asks_anew(consensus: CollectiveConsensus, others: Others) -> None:
    others.says = [[5]]
    consensus.available(Tier.DEVICE)
    consensus.ended()
    assert consensus.available(Tier.DEVICE) == 10


def test_all_yes_commits(consensus: CollectiveConsensus) -> None:
    decision = consensus.propose(Vote("w/1/0", OperationKind.WRITE_THROUGH, True), deferred=True)
    assert decision is not None
    assert decision.outcome is Outcome.COMMIT


def test_another_ranks_no_aborts_with_its_rank_reason_and_shortfall(
    consensus: CollectiveConsensus, others: Others
) -> None:
    others.says = [[0, 0, FULL, 0, -3]]
    decision = consensus.propose(Vote("w/1/0", OperationKind.WRITE_THROUGH, True), deferred=True)
    assert decision is not None
    assert (decision.outcome, decision.reason, decision.rank) == (Outcome.ABORT, Reason.HOST_FULL, 0)
    assert dict(decision.shortfall) == {"host.kv": 3}


def test_the_largest_shortfall_and_the_lowest_rank_are_named(consensus: CollectiveConsensus, others: Others) -> None:
    others.says = [[0, 2, FULL, 0, -3]]
    vote = Vote("w/1/0", OperationKind.WRITE_THROUGH, False, reason=Reason.HOST_FULL, shortfall={"host.kv": 4})
    decision = consensus.propose(vote, deferred=True)
    assert decision is not None
    assert (decision.rank, dict(decision.shortfall)) == (1, {"host.kv": 4})


def test_other_agreements_are_refused(consensus: CollectiveConsensus) -> None:
    with pytest.raises(UsageError):
        consensus.propose(Vote("x/1", OperationKind.CUSTOM, True, Agreement.MIN, value=3), deferred=False)


def test_only_operations_that_are_over_on_all_ranks_end_and_in_order(
    consensus: CollectiveConsensus, others: Others
) -> None:
    first, second, third = started(consensus, 3)
    consensus.ack(Ack(third, True))
    consensus.ack(Ack(first, True))
    others.says = [[3, NONE, NONE]]
    assert [(found.operation, found.ok) for found in consensus.ended()] == [(first, True)]
    consensus.operations = {name: consensus.operations[name] for name in (second, third)}
    consensus.ack(Ack(second, True))
    others.says = [[1, NONE, NONE]]
    assert [found.operation for found in consensus.ended()] == [second]


@pytest.mark.parametrize(
    ("ok_here", "other_says", "rank"),
    [(False, [3, NONE, NONE], 1), (True, [2, 1, 0], 0)],
    ids=["failed here", "failed there"],
)
def test_a_failed_copy_is_retracted_everywhere_and_names_the_rank(
    consensus: CollectiveConsensus, others: Others, ok_here: bool, other_says: list[int], rank: int
) -> None:
    first, second, third = started(consensus, 3)
    for operation in (first, second, third):
        consensus.ack(Ack(operation, ok_here or operation != second, None))
    others.says = [other_says]
    ended = consensus.ended()
    assert [(found.operation, found.ok) for found in ended] == [(first, True), (second, False)]
    assert (ended[1].rank, ended[1].reason, ended[1].drained) == (rank, Reason.COPY_FAILED, True)


def test_a_rank_that_is_not_over_yet_keeps_even_a_failure_waiting(
    consensus: CollectiveConsensus, others: Others
) -> None:
    (operation,) = started(consensus, 1)
    consensus.ack(Ack(operation, False, Reason.COPY_FAILED))
    others.says = [[0, NONE, NONE]]
    assert consensus.ended() == []
    others.says = [[1, NONE, NONE]]
    assert [found.ok for found in consensus.ended()] == [False]


def test_a_step_with_nothing_open_needs_no_collective(consensus: CollectiveConsensus, others: Others) -> None:
    assert consensus.ended() == []
    assert others.heard == []
