"""What an engine is told when the coordinator will not have its rank."""

from kvcoord.domain import Rank
from kvcoord.protocol.effects import JoinFailed


def refusal(group: str, rank: Rank, effect: JoinFailed) -> list[str | int | float | list[list[int]]]:
    """The arguments of JoinRefused."""
    return [group, effect.reason, effect.field, rank, effect.value, effect.other_rank, effect.other_value]
