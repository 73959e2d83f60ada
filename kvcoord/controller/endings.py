"""What an engine is told when its rank cannot stay in the group, or when the ranks have parted."""

from kvcoord.domain import Rank
from kvcoord.errors import JoinRefused
from kvcoord.protocol.effects import DivergenceSeen, JoinFailed, Note


def refusal(group: str, rank: Rank, effect: JoinFailed) -> JoinRefused:
    """The coordinator will not have this rank."""
    return JoinRefused(group, effect.reason, effect.field, rank, effect.value, effect.other_rank, effect.other_value)


def noted(group: str, seen: DivergenceSeen) -> Note:
    """A difference, for the flight recorder and the log."""
    return Note("divergence", seen.operation, {"round": seen.round, "sides": seen.sides, "group": group})


def difference(seen: DivergenceSeen) -> str:
    """Why the group begins anew: where the ranks parted, and what each side has applied if that is known."""
    sides = " against ".join("ranks " + ",".join(map(str, side)) for side in seen.sides)
    return f"the ranks differed at round {seen.round}: {seen.operation or sides}"
