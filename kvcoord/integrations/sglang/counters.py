"""What one rank counts while it agrees: plain numbers, added to by the scheduler's thread, read by whoever asks."""

from typing import Final

from kvcoord.domain import Outcome, Path, Reason

WAITED_S: Final = 1e-4
"""A verdict that has arrived is read in less: only what takes longer was waited for."""

DecisionKey = tuple[str, Path, Outcome, Reason | None]
"""What was decided (a fixed word, never an id), how, with what outcome, and why when it was refused."""


class Counters:
    """Counts from the start of this engine. Equal on all ranks, but for the waits."""

    def __init__(self) -> None:
        self.decisions: dict[DecisionKey, int] = {}
        self.steps = 0
        self.verdict_waits = 0
        self.verdict_wait_s = 0.0

    def decided(self, what: str, path: Path, outcome: Outcome, reason: Reason | None = None) -> None:
        key = (what, path, outcome, reason)
        self.decisions[key] = self.decisions.get(key, 0) + 1

    def covered(self, what: str, reason: Reason | None = None) -> None:
        """Decided alone, alike on every rank, on the agreed capacity. With a reason: it was refused."""
        self.decided(what, Path.COVERED, Outcome.ABORT if reason else Outcome.COMMIT, reason)

    def waited(self, seconds: float) -> None:
        """One step's verdict was not there yet, and came after so many seconds."""
        if seconds > WAITED_S:
            self.verdict_waits += 1
            self.verdict_wait_s += seconds
