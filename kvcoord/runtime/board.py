"""What a group member tells the thread of its engine: verdicts, decisions, and why it is over.

Reading what is there costs the engine a dictionary look-up. Only what has not come yet, and cannot be read from the
socket by the engine's thread itself, is waited for here, without polling: for a token in a queue, which costs a third
of a condition variable's wake-up.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvcoord.domain import OperationId
from kvcoord.errors import KvcoordError
from kvcoord.protocol.messages import Decision, Verdict

Held = TypeVar("Held")


class Board:
    """One thread posts, another takes. Bounded by the lag and by the decisions that the engine waits for.

    `verdicts` and `decisions` are what was posted and not taken, `failure` is why nothing more will come.
    """

    def __init__(self) -> None:
        self.capacity: Sequence[int] | None = None
        """Agreed free counts at activation; None before the group worked for the first time."""
        self.verdicts: dict[int, Verdict] = {}
        self.decisions: dict[OperationId, Decision] = {}
        self._wanted: set[OperationId] = set()
        self.failure: KvcoordError | None = None
        self._changed: SimpleQueue[None] = SimpleQueue()
        """A token for each change while somebody waits. One that is left over makes the next wait look once more."""
        self._waiting = False

    # --- the member's thread --------------------------------------------------------------------------------------

    def begin(self, capacity: Sequence[int]) -> None:
        """The group works for the first time."""
        self.capacity = capacity
        self._wake()

    def post_verdict(self, verdict: Verdict) -> None:
        if self.failure is None:
            self.verdicts[verdict.round] = verdict
            self._wake()

    def post_decision(self, decision: Decision) -> None:
        """Keeps the decision if the engine waits for it."""
        if decision.operation in self._wanted:
            self.decisions[decision.operation] = decision
            self._wake()

    def fail(self, error: KvcoordError) -> None:
        """Nothing more will come, and what has come is void. The first error counts."""
        if self.failure is None:
            self.failure = error
            self.verdicts.clear()
            self._wake()

    def _wake(self) -> None:
        """Whoever waits has said so before it looked, so either it sees what was posted or it is woken here."""
        if self._waiting:
            self._changed.put(None)

    # --- the engine's thread; `give_up_at` is a time of the system's monotonic clock ------------------------------

    def raise_failure(self) -> None:
        """Raises why the membership is over, if it is."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def take_verdict(self, round_number: int, give_up_at: float) -> Verdict | None:
        """The verdict of this round; None when it has not come in time. Raises the failure."""
        return self._wait(lambda: self.verdicts.pop(round_number, None), give_up_at)

    def want(self, operation: OperationId) -> None:
        """The decision of this operation will be asked for."""
        self._wanted.add(operation)

    def take_decision(self, operation: OperationId, give_up_at: float) -> Decision | None:
        """A decision that is wanted; None when it has not come in time. Raises the failure."""
        try:
            decision = self.decisions.pop(operation, None)
            if decision is not None:
                self.raise_failure()
                return decision
            return self._wait(lambda: self.decisions.pop(operation, None), give_up_at)
        finally:
            self._wanted.discard(operation)

    def wait_begun(self, give_up_at: float) -> bool:
        """Waits until the group works. Raises the failure."""
        return self._wait(lambda: self.capacity, give_up_at) is not None

    def _wait(self, take: Callable[[], Held | None], give_up_at: float) -> Held | None:
        self._waiting = True
        try:
            while True:
                held = take()
                self.raise_failure()
                remaining_s = give_up_at - time.monotonic()
                if held is not None or remaining_s <= 0:
                    return held
                with suppress(Empty):
                    self._changed.get(timeout=remaining_s)
        finally:
            self._waiting = False
