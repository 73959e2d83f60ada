"""Votes of an engine's own: how much they may carry."""

from kvcoord.domain import Agreement, Committed
from kvcoord.protocol.local import Agree, Agreed, Failed
from tests.controller.cluster import Cluster


def keys(count: int) -> list[bytes]:
    return [key.to_bytes(16, "big") for key in range(count)]


def test_values_of_open_votes_stay_below_a_message_and_the_engine_is_told_why() -> None:
    cluster = Cluster(2, 8, 8, limits={"message_bytes_max": 16384})
    cluster.advance()
    votes = [Agree(f"o{n}", True, Agreement.INTERSECT, value=keys(200), deferred=True) for n in range(2)]
    for taken, refused in cluster.ask(*votes):
        assert isinstance(taken, Agreed)
        assert isinstance(refused, Failed)
        assert refused.error == "UsageError"
        assert refused.fields[:2] == ["value", "3200 bytes"]
        assert "4096 bytes together" in str(refused.fields[2])
        assert "3200 are taken" in str(refused.fields[2])
    cluster.advance()
    outcomes = cluster.advance().outcomes
    assert [outcome.operation for outcome in outcomes if isinstance(outcome, Committed)] == ["o0"]
    for (again,) in cluster.ask(votes[1]):
        assert isinstance(again, Agreed)
    for (alone,) in cluster.ask(Agree("o2", True, Agreement.INTERSECT, value=keys(300))):
        assert isinstance(alone, Failed)
