"""How long an engine's calls wait for copies of this rank. Knows nothing of calls, copies or groups.

A copy is never cancelled, so one that does not end keeps its pages for ever; whoever waits for it does not.
"""

from collections.abc import Collection

from kvcoord.domain import OperationId

LIMIT = "copy_timeout_s"


class Patience:
    """Runs out `limit_s` after a wait began: for calls that cannot be taken, and for each copy that one waits for."""

    __slots__ = ("_awaited", "_since", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: float | None = None
        self._awaited: dict[OperationId, float] = {}

    def look(self, waiting: bool, awaited: Collection[OperationId], now: float) -> None:
        """Whether calls cannot be taken now, and which operations' own copies are waited for."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now
        if awaited or self._awaited:
            self._awaited = {operation: self._awaited.get(operation, now) for operation in awaited}

    def over(self, now: float) -> bool:
        """Whether calls that cannot be taken have waited for too long."""
        return self._since is not None and self._since + self.limit_s <= now

    def late(self, now: float) -> list[OperationId]:
        """Operations whose copies have been waited for too long."""
        return [operation for operation, since in self._awaited.items() if since + self.limit_s <= now]

    def deadline(self) -> float | None:
        """When it runs out first, None while nobody waits."""
        begun = [*self._awaited.values()] if self._since is None else [self._since, *self._awaited.values()]
        return min(begun) + self.limit_s if begun else None
