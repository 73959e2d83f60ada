"""One scheduler step after another: what this rank says in its frame, and the verdict that is applied. Knows no SGLang.

At the start of step k the verdict of step k - lag is applied, then frame k goes out. Everything collected here between
two frames travels in one message, so a step costs one message each way whatever happens in it.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Final, Protocol

from kvcoord.domain import OperationId, OperationKind, Path, Reason
from kvcoord.integrations.sglang.counters import Counters
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.messages import Ack, Decision, Verdict, Vote

EVENTS_KEPT: Final = 4096
"""Applied events that a rank can still name when digests differ."""


class Membership(Protocol):
    """What the rounds need of `runtime.member.Member`."""

    @property
    def verdicts(self) -> dict[int, Verdict]: ...

    def open(self, free: Sequence[int]) -> Sequence[int]: ...

    def close(self) -> None: ...

    def send(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None: ...

    def take(self, round_number: int) -> Verdict: ...

    def decide(self, vote: Vote) -> Decision: ...

    @property
    def state(self) -> str: ...


class Rounds:
    """The steps of one rank. `step` is the next frame's number; `digest` collects everything that must be equal.

    `life` counts resets of the cache: operations of an earlier life are still answered, and change nothing.
    """

    def __init__(self, member: Membership, digest: Digest, lag: int) -> None:
        self.digest = digest
        self.lag = lag
        self.step = 0
        self.life = 0
        self.counters = Counters()
        self._member = member
        self._arrived = member.verdicts
        self._issued = 0
        self._votes: list[Vote] = []
        self._acks: list[Ack] = []

    def name(self, kind: OperationKind | str) -> OperationId:
        """The id of a new operation. Every rank issues the same operations in the same order, so ids are equal."""
        self._issued += 1
        return f"{kind}/{self.life}/{self._issued}"

    def vote_yes(self, operation: OperationId, kind: OperationKind) -> None:
        self._votes.append(Vote(operation, kind, True))

    def vote_no(self, operation: OperationId, kind: OperationKind, reason: Reason, shortfall: dict[str, int]) -> None:
        self._votes.append(Vote(operation, kind, False, reason=reason, shortfall=shortfall))

    def decide(self, operation: OperationId, kind: OperationKind, reason: Reason, *, yes: bool) -> Decision:
        """All ranks' word on something that cannot wait for a verdict: blocks until every rank has voted, or is late.

        `reason` is told with a no. Raises as `Member.decide`.
        """
        decision = self._member.decide(Vote(operation, kind, yes, reason=None if yes else reason))
        self.counters.decided(_what(operation), Path.IMMEDIATE, decision.outcome, decision.reason)
        return decision

    def voted(self, decision: Decision) -> None:
        """A verdict brings this decision, on every rank at this point."""
        self.event(f"{decision.outcome} {decision.operation}")
        self.counters.decided(_what(decision.operation), Path.VOTED, decision.outcome, decision.reason)

    def ack(self, operation: OperationId) -> None:
        """What this operation does on this rank is over."""
        self._acks.append(Ack(operation, True))

    def event(self, line: str) -> None:
        """Something happened that has to happen on every rank at this point."""
        self.digest.apply(line)

    def verdict(self) -> Verdict | None:
        """The verdict that this step applies; None in the first `lag` steps."""
        due = self.step - self.lag
        if due < 0:
            return None
        verdict = self._arrived.pop(due, None)
        if verdict is not None:
            return verdict
        began = perf_counter()
        verdict = self._member.take(due)
        self.counters.waited(perf_counter() - began)
        return verdict

    def send(self, free: list[int], index_digest: int) -> None:
        """Ends this step's part: the frame goes out."""
        votes, self._votes = self._votes, []
        acks, self._acks = self._acks, []
        self._member.send(self.step, free, self.digest.combined(index_digest), votes, acks)
        self.step += 1
        self.counters.steps = self.step

    def begin_life(self) -> None:
        """The cache was reset, on every rank at this point."""
        self.life += 1
        self.event(f"reset {self.life}")

    @property
    def state(self) -> str:
        """How the group stands, as this rank knows it. For display only."""
        return self._member.state

    def close(self) -> None:
        self._member.close()


def _what(operation: OperationId) -> str:
    """The first word of an id: what is decided."""
    return operation.partition("/")[0]
