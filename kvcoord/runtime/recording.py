"""What the processes of kvcoord write down: what they heard, said and did, by reference, for `observability.story`.

Kinds of events, and their details:

    frame, vote, ack, verdict, entry        (peer, message); the peer is empty on a rank
    hello, prepare, accept, activate, suspended, rejoin, leave, refused, divergence      some of their fields
    applied                                 (event, digest after it): what must be the same on every rank, in order
    copy_started, copy_ended, answered      what became of an operation here
    others                                  notes of the machines

Heartbeats and their answers are not written down. Times are the system's own and not the event loop's, which are
rounded: they put the events of all processes of a host in order.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final

from kvcoord.controller.effects import Reply, StartCopy
from kvcoord.domain import Aborted, Committed, OperationId, Reason
from kvcoord.observability.recorder import Detail, FlightRecorder
from kvcoord.protocol.digest import Digest
from kvcoord.protocol.messages import (
    Accept,
    Activate,
    Divergence,
    Frame,
    FromCoordinator,
    FromRank,
    Hello,
    Leave,
    Numbered,
    Prepare,
    Refused,
    Rejoin,
    StreamAck,
    StreamVote,
    Suspended,
    Verdict,
    epoch_number,
)

Message = FromRank | FromCoordinator

_OUTCOMES: Final = frozenset({"commit", "abort", "complete", "retract"})
"""First words of what was applied that are followed by the name of an operation."""

NO_PEER: Final = b""

_BY_REFERENCE: Final[dict[type[object], str]] = {
    Frame: "frame",
    StreamVote: "vote",
    StreamAck: "ack",
    Verdict: "verdict",
    Numbered: "entry",
}

_IN_SHORT: Final[dict[type[object], tuple[str, Callable[..., dict[str, object]]]]] = {
    Hello: ("hello", lambda said: {"rank": said.rank, "incarnation": said.incarnation, "attach": said.attach}),
    Prepare: ("prepare", lambda said: {"epoch": epoch_number(said.epoch)}),
    Accept: ("accept", lambda said: {"epoch": epoch_number(said.epoch), "in_doubt": said.report.in_doubt}),
    Activate: ("activate", lambda said: {"epoch": epoch_number(said.epoch), "round": said.round}),
    Rejoin: ("rejoin", lambda said: {}),
    Suspended: ("suspended", lambda said: {"rank": said.rank, "cause": said.cause}),
    Divergence: ("divergence", lambda said: {"round": said.round, "sides": said.sides, "operation": said.operation}),
    Refused: ("refused", lambda said: {"rank": said.rank, "field": said.field, "value": said.value}),
    Leave: ("leave", lambda said: {"epoch": epoch_number(said.epoch)}),
}


def note_message(recorder: FlightRecorder, peer: bytes, message: Message) -> None:
    """One message that was heard from or said to `peer`."""
    kind = _BY_REFERENCE.get(type(message))
    if kind is not None:
        operation, weight = "", 1
        if type(message) is Frame:
            weight += len(message.votes) + len(message.acks)
        elif type(message) is Verdict:
            weight += len(message.decisions) + len(message.completions)
        elif type(message) is Numbered:
            operation = message.entry.operation
        elif type(message) is StreamVote:
            operation = message.vote.operation
        elif type(message) is StreamAck:
            operation = message.ack.operation
        recorder.record(monotonic(), kind, operation, (peer, message), weight)
        return
    short = _IN_SHORT.get(type(message))
    if short is not None:
        recorder.record(monotonic(), short[0], "", {"peer": peer} | short[1](message))


class RankRecording:
    """What one rank writes down beside its messages."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self._digest: Digest | None = None
        self._applied = 0

    def message(self, message: Message) -> None:
        """Heard from or said to the coordinator."""
        note_message(self.recorder, NO_PEER, message)

    def performed(self, effect: Reply | StartCopy) -> None:
        """An answer that carries an outcome, or a copy that starts."""
        if isinstance(effect, Reply):
            outcome = getattr(effect.answer, "outcome", None)
            if outcome is not None and isinstance(outcome, Committed | Aborted):
                self.recorder.record(monotonic(), "answered", outcome.operation, outcome)
            return
        pages = len(effect.source_slots[0]) if effect.source_slots else 0
        self.recorder.record(monotonic(), "copy_started", effect.operation, {"from": effect.source, "pages": pages})

    def copy_ended(self, operation: OperationId, error: Reason | None) -> None:
        """This rank's own copy is over."""
        detail: Detail = None if error is None else {"error": error}
        self.recorder.record(monotonic(), "copy_ended", operation, detail)

    def caught_up(self, digest: Digest) -> None:
        """Whatever this rank has applied since this was last called."""
        if digest is not self._digest:
            self._digest, self._applied = digest, 0
            self.recorder.record(monotonic(), "applied", "", ("begin", digest.log()[0][1]))
        if digest.applied == self._applied:
            return
        for event in digest.since(self._applied):
            what, name, *_ = event[0].split(" ", 2)
            self.recorder.record(monotonic(), "applied", name if what in _OUTCOMES else "", event)
        self._applied = digest.applied
