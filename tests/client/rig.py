"""A session without a socket, and callers that remember what they were told."""

from typing import Any

from kvcoord.client import reading
from kvcoord.client.progress import Landing, PendingOutcome
from kvcoord.client.results import GrantedLease, StartedLoad, expect
from kvcoord.client.session import Asked, Session
from kvcoord.errors import KvcoordError
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advance,
    Agree,
    Answer,
    Answers,
    Call,
    FromEngine,
    Landed,
    LoadBack,
    Loaded,
    Match,
    WriteThrough,
)
from tests.client.values import A


class Probe(Asked[Any]):
    """A caller that remembers, and can be gone."""

    def __init__(self, call: Call, read: Any, landing: Landing | None = None, *, gone: bool = False) -> None:
        super().__init__(call, read, landing)
        self.results: list[object] = []
        self.errors: list[KvcoordError] = []
        self.gone = gone

    def settle(self, result: object) -> bool:
        if self.gone:
            return False
        self.results.append(result)
        return True

    def fail(self, error: KvcoordError) -> None:
        self.errors.append(error)


class Rig:
    """A session whose messages are decoded."""

    closed = True
    """So that its leases need no release."""

    def __init__(self, *, message_bytes_max: int = 1 << 20, calls_open_max: int = 1000) -> None:
        self.session = Session("ipc:///w", message_bytes_max, calls_open_max)
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)

    def voided(self, number: int) -> bool:
        return self.session.voided(number)

    def ask(self, call: Call, read: Any = reading.read_done, *, gone: bool = False) -> Probe:
        landing = Landing(3) if isinstance(call, Acquire | LoadBack) else None
        probe = Probe(call, read, landing, gone=gone)
        self.session.ask(probe)
        return probe

    def match(self, key: bytes = A) -> Probe:
        return self.ask(Match(key), reading.read_match)

    def acquire(self, *, landed: bool = False, gone: bool = False) -> Probe:
        return self.ask(Acquire(A, landed), self._lease, gone=gone)

    def load_back(self) -> Probe:
        return self.ask(LoadBack(A, [[1]]), self._load)

    def write(self) -> Probe:
        return self.ask(WriteThrough(A, [[1]], deferred=True), self._pending)

    def agree(self, operation: str) -> Probe:
        return self.ask(Agree(operation, True, deferred=True), self._pending)

    def advance(self) -> Probe:
        return self.ask(Advance(1), reading.read_advanced)

    def sent(self) -> list[list[tuple[int, Call]]]:
        return [self._decoder.decode(payload).calls for payload in self.session.outgoing()]

    def answer(self, *answers: tuple[int, Answer]) -> None:
        self.session.receive(encode(Answers(list(answers))))

    def landed(self, operation: str, layers: int, error: str = "") -> None:
        self.session.receive(encode(Landed(operation, layers, error)))

    def _lease(self, asked: Asked[Any], answer: Answer) -> GrantedLease:
        found = expect(answer, Acquired)
        return GrantedLease(found, self.session.landings(asked, found), self, asked.number)

    def _load(self, asked: Asked[Any], answer: Answer) -> StartedLoad:
        found = expect(answer, Loaded)
        return StartedLoad(found, self.session.landings(asked, found))

    def _pending(self, asked: Asked[Any], answer: Answer) -> PendingOutcome:
        operation, outcome, exact = reading.decided(asked, answer)
        pending = PendingOutcome(operation, outcome)
        self.session.pending(pending, exact=exact)
        return pending
