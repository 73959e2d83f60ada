"""What happened in a world: kept cheaply, told when something went wrong.

The story of an operation is every line that names it, and what happened to processes and membership meanwhile.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from kvcoord.domain import OperationId
from kvcoord.protocol.effects import Note
from kvcoord.protocol.local import Answer, Call
from kvcoord.protocol.messages import Alive, FetchEntries, Heartbeat, Hello, LogRequest, OperationLog, Waiting
from kvcoord.simulation.agenda import Agenda
from kvcoord.simulation.memory import OpenCopy

_CHATTER: Final = (Alive, Heartbeat, Waiting, Hello, FetchEntries, LogRequest, OperationLog)

LINES_MAX: Final = 400
"""Lines of one story that are shown; the last ones count."""

_TEXT_MAX: Final = 300

Told = str | msgspec.Struct | tuple[object, ...]


class Story:
    """Events in their order: (world time, who, verb, what). `what` is made into text when it is told."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._events: list[tuple[float, str, str, Told]] = []

    def __len__(self) -> int:
        return len(self._events)

    def fault(self, text: str) -> None:
        self._add("world", "fault", text)

    def note(self, who: str, note: Note) -> None:
        self._add(who, "notes", note)

    def applied(self, who: str, event: str) -> None:
        self._add(who, "applies", event)

    def sent(self, who: str, message: msgspec.Struct) -> None:
        if not isinstance(message, _CHATTER):
            self._add(who, "says", message)

    def received(self, who: str, message: msgspec.Struct) -> None:
        if not isinstance(message, _CHATTER):
            self._add(who, "hears", message)

    def answered(self, who: str, call: Call, answer: Answer) -> None:
        self._add(who, "answers", (type(call).__name__, answer))

    def copy(self, who: str, copy: OpenCopy, verb: str) -> None:
        self._add(who, f"copy {verb}", copy.operation)

    def digest(self) -> str:
        """A number for the whole story: equal stories, equal numbers."""
        digest = xxhash.xxh3_128()
        for line in self._lines(self._events):
            digest.update(line.encode())
        return digest.hexdigest()

    def tell(self, operation: OperationId = "") -> list[str]:
        """The lines that matter for one operation, the last LINES_MAX of them. Empty: of everything."""
        events = [event for event in self._events if self._matters(event, operation)]
        return list(self._lines(events[-LINES_MAX:]))

    def _matters(self, event: tuple[float, str, str, Told], operation: OperationId) -> bool:
        _, _, verb, what = event
        if not operation or verb in ("fault", "notes"):
            return True
        return operation in _text(what)

    def _lines(self, events: list[tuple[float, str, str, Told]]) -> Iterator[str]:
        for at, who, verb, what in events:
            text = _text(what)
            shown = text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + " ..."
            yield f"{at:10.4f}  {who:<14} {verb:<11} {shown}"

    def _add(self, who: str, verb: str, what: Told) -> None:
        self._events.append((self._agenda.now, who, verb, what))


def _text(what: Told) -> str:
    if isinstance(what, str):
        return what
    if isinstance(what, Note):
        return f"{what.kind} {what.operation} {what.detail}"
    return str(what)
