"""How long an engine's calls wait for nothing but copies of this rank. Knows nothing of calls, copies or groups.

A copy is never cancelled, so one that does not end keeps its pages for ever; whoever waits for these pages does not.
"""

LIMIT = "copy_timeout_s"


class Patience:
    """Runs out `limit_s` after the wait began."""

    __slots__ = ("_since", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: float | None = None

    def look(self, waiting: bool, now: float) -> None:
        """Whether somebody waits now."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now

    def over(self, now: float) -> bool:
        deadline = self.deadline()
        return deadline is not None and deadline <= now

    def deadline(self) -> float | None:
        """When it runs out, None while nobody waits."""
        return None if self._since is None else self._since + self.limit_s
