"""What goes on after its call was answered: outcomes of a later round, copies that land layer by layer. Pure.

A `PendingOutcome` or `Landing` only knows; who waits for it, and how, is the client's business. The two registers keep
those that are not over, and what came before its call was answered: answers come in any order.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kvcoord.client.failures import fresh
from kvcoord.domain import OperationId
from kvcoord.errors import KvcoordError, LoadRetracted, TransferFailed, UsageError
from kvcoord.protocol.local import Landed, Outcome

EARLY_OUTCOMES_MAX = 4096
"""Outcomes kept while a call that they may belong to is unanswered. More are never open in one group."""


class Watched:
    """Something that changes. Who watches is called once, at the next change."""

    __slots__ = ("_wakes",)

    def __init__(self) -> None:
        self._wakes: list[Callable[[], None]] = []

    def watch(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Harmless after the change."""
        if wake in self._wakes:
            self._wakes.remove(wake)

    def _changed(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()


class PendingOutcome(Watched):
    """The outcome of one operation, known now or with a later `advance`.

    `operation` names its first attempt. `outcome` is None until it is known. True once it is known to be committed.
    """

    __slots__ = ("_error", "operation", "outcome")

    def __init__(self, operation: OperationId, outcome: Outcome | None = None) -> None:
        super().__init__()
        self.operation = operation
        self.outcome = outcome
        self._error: KvcoordError | None = None

    def __bool__(self) -> bool:
        return bool(self.outcome)

    def done(self) -> bool:
        """Is the outcome known, or known never to come?"""
        return self.outcome is not None or self._error is not None

    def result(self) -> Outcome:
        """The outcome. Raises UsageError before it is known, or why it will never be."""
        if self.outcome is not None:
            return self.outcome
        if self._error is not None:
            raise fresh(self._error)
        raise UsageError("pending", self.operation, "is not decided yet: its outcome comes with a later advance")

    def settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._changed()

    def fail(self, error: KvcoordError) -> None:
        self._error = error
        self._changed()


class Outcomes:
    """Operations put to the vote of a later round, by id. An outcome is matched without the attempt in its id."""

    __slots__ = ("_early", "_exact", "_stems")

    def __init__(self) -> None:
        self._exact: dict[OperationId, PendingOutcome] = {}
        self._stems: dict[str, PendingOutcome] = {}
        self._early: deque[Outcome] = deque(maxlen=EARLY_OUTCOMES_MAX)

    @property
    def early(self) -> bool:
        """Is an outcome kept that nobody expected?"""
        return bool(self._early)

    def expect(self, pending: PendingOutcome, *, exact: bool) -> None:
        """A call was answered without an outcome. `exact`: its id is the caller's, and has no attempt in it."""
        for outcome in self._early:
            same = outcome.operation == pending.operation
            if same or (not exact and stem(outcome.operation) == stem(pending.operation)):
                pending.settle(outcome)
                return
        if exact:
            self._exact[pending.operation] = pending
        else:
            self._stems[stem(pending.operation)] = pending

    def settle(self, outcome: Outcome) -> bool:
        """The outcome of an operation. Whether it was expected."""
        pending = self._exact.pop(outcome.operation, None)
        if pending is None:
            pending = self._stems.pop(stem(outcome.operation), None)
        if pending is None:
            return False
        pending.settle(outcome)
        return True

    def keep(self, outcome: Outcome) -> None:
        """Nobody expects it yet."""
        self._early.append(outcome)

    def forget_early(self) -> None:
        """No call is unanswered that an early outcome could belong to."""
        self._early.clear()

    def fail(self, error: KvcoordError) -> None:
        """Nothing more will be decided."""
        waiting = [*self._exact.values(), *self._stems.values()]
        self._exact.clear()
        self._stems.clear()
        self._early.clear()
        for pending in waiting:
            pending.fail(error)


class Landing(Watched):
    """This rank's copy of one load-back. `layers` have landed, of `layer_count`."""

    __slots__ = ("error", "layer_count", "layers", "operation", "retracted", "serial")

    def __init__(self, layer_count: int) -> None:
        super().__init__()
        self.operation: OperationId = ""
        self.layer_count = layer_count
        self.layers = 0
        self.serial = 0
        self.error: KvcoordError | None = None
        """TransferFailed when the copy failed, PeerUnavailable when nobody can know any more."""
        self.retracted: LoadRetracted | None = None
        """The group took it back, whatever became of this rank's copy."""

    @property
    def over(self) -> bool:
        return self.error is not None or self.layers >= self.layer_count

    def land(self, layers: int, cause: str = "") -> None:
        """`cause`: the copy failed, after so many layers."""
        self.layers = max(self.layers, layers)
        if cause and self.layers < self.layer_count:
            self.error = TransferFailed(self.operation, self.layers, cause)
        self._changed()

    def fail(self, error: KvcoordError) -> None:
        self.error = error
        self._changed()

    def retract(self, error: LoadRetracted) -> None:
        self.retracted = error
        self._changed()

    def look_again(self) -> None:
        """Something that this copy's watchers wait for besides it has changed."""
        self._changed()


def missing(landings: Sequence[Landing], layers: int) -> Landing | None:
    """The first copy of which `layers` layers have not landed yet, None when all have. Raises its error."""
    for landing in landings:
        if landing.retracted is not None:
            raise fresh(landing.retracted)
    for landing in landings:
        if landing.layers < layers:
            if landing.error is not None:
                raise fresh(landing.error)
            return landing
    return None


class Landings:
    """Load-backs of this session that are not over, in the order in which they were asked for."""

    __slots__ = ("_early", "_named", "_open", "_serial")

    def __init__(self) -> None:
        self._serial = 0
        self._open: dict[int, Landing] = {}
        self._named: dict[OperationId, Landing] = {}
        self._early: dict[OperationId, Landed] = {}

    def begin(self, landing: Landing) -> None:
        """A call that may load pages was asked."""
        self._serial += 1
        landing.serial = self._serial
        self._open[self._serial] = landing

    def follow(self, landing: Landing, operation: OperationId) -> None:
        """Its call was answered: the copy is under way, and reports follow."""
        landing.operation = operation
        self._named[operation] = landing
        early = self._early.pop(operation, None)
        if early is not None:
            self.land(early)

    def earlier(self, landing: Landing) -> tuple[Landing, ...]:
        """Copies of calls before this one, under way or perhaps to come: they may bring pages of its path."""
        return tuple([other for serial, other in self._open.items() if serial < landing.serial])

    def end(self, landing: Landing, operation: OperationId = "", cause: str = "") -> None:
        """Nothing is left to land; `cause`: it failed."""
        landing.operation = operation or landing.operation
        landing.land(0 if cause else landing.layer_count, cause)
        self._close(landing)

    def land(self, report: Landed) -> None:
        """A report of the worker. One that belongs to no call, answered or not, is dropped."""
        landing = self._named.get(report.operation)
        if landing is None:
            if len(self._open) > len(self._named):
                self._early[report.operation] = report
            return
        landing.land(report.layers, report.error)
        if landing.over:
            self._close(landing)

    def void(self, error: KvcoordError) -> None:
        """The group began anew: copies of before are over, and their ids may come again. Open calls are answered."""
        waiting = list(self._named.values())
        for landing in waiting:
            self._close(landing)
            landing.fail(error)
        self._early.clear()

    def fail(self, error: KvcoordError) -> None:
        """No more reports will come."""
        waiting = list(self._open.values())
        self._open.clear()
        self._named.clear()
        self._early.clear()
        for landing in waiting:
            landing.fail(error)

    def _close(self, landing: Landing) -> None:
        self._open.pop(landing.serial, None)
        self._named.pop(landing.operation, None)
        if len(self._open) == len(self._named):
            self._early.clear()


def stem(operation: OperationId) -> str:
    """An operation's id without the attempt: all attempts have the same."""
    return operation.rpartition("/")[0]
