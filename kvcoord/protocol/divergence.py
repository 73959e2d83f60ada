"""Watches whether the ranks stay equal, on the coordinator: DESIGN section 4.4.

The first difference of an epoch is named once: round, sides, and, from the ranks' logs of applied events, the first one
that differs. A rank whose log does not come within `logs_timeout_s` cannot keep the others from hearing of it.
"""

from collections.abc import Mapping

import msgspec

from kvcoord.domain import Rank
from kvcoord.protocol.digest import first_difference, sides
from kvcoord.protocol.messages import Divergence, OperationLog


class DivergenceWatch:
    """`found` is the divergence of this epoch, if any. Methods return it once it is ready to be told to all."""

    def __init__(self, world_size: int, logs_timeout_s: float) -> None:
        self.found: Divergence | None = None
        self._world_size = world_size
        self._timeout_s = logs_timeout_s
        self._logs: dict[Rank, list[tuple[str, int]]] | None = None
        self._deadline = 0.0

    def begin(self) -> None:
        """A new epoch."""
        self.found = None
        self._logs = None

    def differ(self, epoch: int, round_number: int, by_rank: Mapping[Rank, int], now: float) -> bool:
        """Compares the digests of one round. True: they differ, for the first time; all logs are to be asked for."""
        if self.found is not None or len(set(by_rank.values())) <= 1:
            return False
        self.found = Divergence(epoch, round_number, sides(dict(by_rank)), "")
        self._logs = {}
        self._deadline = now + self._timeout_s
        return True

    def declare(self, divergence: Divergence) -> Divergence | None:
        """A divergence that shows without digests or logs. None when there is one already."""
        if self.found is not None:
            return None
        self.found = divergence
        return divergence

    def log(self, rank: Rank, message: OperationLog) -> Divergence | None:
        """One rank's log. The last one completes the finding."""
        if self._logs is None or self.found is None or message.round != self.found.round:
            return None
        self._logs[rank] = message.events
        return self.conclude() if len(self._logs) == self._world_size else None

    def expire(self, now: float) -> Divergence | None:
        """The finding from the logs that have come, once their time is over."""
        return self.conclude() if self._logs is not None and self._deadline <= now else None

    def conclude(self) -> Divergence | None:
        """The finding from the logs that have come; None when there is nothing to conclude."""
        if self._logs is None or self.found is None:
            return None
        logs, self._logs = self._logs, None
        self.found = msgspec.structs.replace(self.found, operation=first_difference(logs))
        return self.found

    def deadline(self) -> float | None:
        return self._deadline if self._logs is not None else None
