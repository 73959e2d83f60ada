"""One session with a worker, without its socket: calls numbered and packed, answers matched and read. Pure.

Calls are queued until whoever owns the socket takes what is to be sent: all that were asked since the last time travel
as one message. Answers come in any order. Whoever asked may be gone when the answer comes; what it would have held is
then given back. It does not know how a caller waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from kvcoord.client.failures import VOTES_END, exception_of, name_of
from kvcoord.client.progress import Landing, Landings, Outcomes, PendingOutcome
from kvcoord.client.results import Allocation, GrantedLease
from kvcoord.client.retractions import Retractions
from kvcoord.errors import DeadlineExceeded, FrameError, GroupRenewed, KvcoordError, PeerUnavailable, UsageError
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import (
    Acquire,
    Acquired,
    Advanced,
    Agree,
    Answer,
    Answers,
    Call,
    Calls,
    Done,
    Failed,
    Free,
    FromWorker,
    LoadBack,
    Loaded,
    Opened,
    Outcome,
    Register,
    Release,
    WriteThrough,
)

T = TypeVar("T")

NOBODY: Final = 0
"""Number of an answer that belongs to no call: the worker could not read what it was sent."""


class Asked(ABC, Generic[T]):
    """One call until it is answered. `deadline` is for its owner; `landing` follows what the call may load.

    `number` orders the calls of a session, from 1.
    """

    __slots__ = ("call", "deadline", "landing", "number", "read")

    def __init__(self, call: Call, read: "Callable[[Asked[T], Answer], T]", landing: Landing | None = None) -> None:
        self.number = NOBODY
        self.call = call
        self.read = read
        self.landing = landing
        self.deadline = 0.0

    @abstractmethod
    def settle(self, result: T) -> bool:
        """The answer, read. False: nobody wants it any more."""

    @abstractmethod
    def fail(self, error: KvcoordError) -> None:
        """There will be no answer. `error` is this call's own."""


class _GivenBack(Asked[Done]):
    """A call that the session itself makes, to give back what nobody wants."""

    __slots__ = ()

    def __init__(self, call: Call) -> None:
        super().__init__(call, _read_anything)

    def settle(self, result: Done) -> bool:
        return True

    def fail(self, error: KvcoordError) -> None:
        """Whatever was held ends with the session."""


class Session:
    """Calls out, answers in. `address` is where the worker is, for errors."""

    def __init__(self, address: str, message_bytes_max: int, calls_open_max: int) -> None:
        self.address = address
        self.lost = ""
        """Why the session is over, empty while it is not."""
        self.answers_unasked = 0
        self._bytes_max = message_bytes_max
        self._calls_open_max = calls_open_max
        self._decoder: Decoder[FromWorker] = Decoder(FromWorker, message_bytes_max)
        self._number = NOBODY
        self._open: dict[int, Asked[Any]] = {}
        self._queue: list[tuple[int, Call]] = []
        self._outcomes = Outcomes()
        self._landings = Landings()
        self._retractions = Retractions()
        self._lockstep = False
        """Steps tell how load-backs end."""
        self._renewed = False
        self._registered_at = NOBODY
        self._void_through = NOBODY

    @property
    def queued(self) -> bool:
        """Is there something to send?"""
        return bool(self._queue)

    @property
    def calls_open(self) -> int:
        """Calls without an answer, those that nobody waits for any more among them."""
        return len(self._open)

    def voided(self, number: int) -> bool:
        """Has the group begun anew since this call was asked? What was granted to it is held no longer."""
        return self._renewed or number <= self._void_through

    # --- out ------------------------------------------------------------------------------------------------------

    def ask(self, asked: Asked[Any]) -> None:
        """Queues a call. Raises PeerUnavailable when the session is over or the worker has stopped to answer."""
        if self.lost:
            raise PeerUnavailable(self.address, self.lost)
        if len(self._open) >= self._calls_open_max:
            cause = f"{len(self._open)} calls are not answered, calls_open_max={self._calls_open_max}"
            raise PeerUnavailable(self.address, cause)
        self._enqueue(asked)
        if asked.landing is not None:
            self._landings.begin(asked.landing)
        elif type(asked.call) is Register:
            self._begin_life(asked.number)

    def outgoing(self) -> list[bytes]:
        """What is queued, as messages to send now and in this order: one, unless it would be too long."""
        calls, self._queue = self._queue, []
        return self._packed(calls) if calls else []

    def give_back(self, result: object) -> None:
        """Queues the return of what a call was granted for somebody who no longer wants it."""
        if self.lost:
            return
        if isinstance(result, GrantedLease) and result.held:
            result.released = True
            self._enqueue(_GivenBack(Release(result.number)))
        elif isinstance(result, Allocation) and result.slots:
            self._enqueue(_GivenBack(Free(result.slots)))

    # --- in -------------------------------------------------------------------------------------------------------

    def receive(self, payload: bytes) -> None:
        """One message of the worker. Settles calls; a message that makes no sense ends the session."""
        if self.lost:
            return
        try:
            message = self._decoder.decode(payload)
            if isinstance(message, Answers):
                for number, answer in message.answers:
                    self._take(number, answer)
            else:
                self._landings.land(message)
        except FrameError as error:
            self.lose(f"does not speak the protocol of this release: {error.cause}")

    def lose(self, cause: str) -> None:
        """The worker is gone: nothing that is open will be answered."""
        if self.lost:
            return
        self.lost = cause
        waiting = list(self._open.values())
        self._open.clear()
        self._queue.clear()
        for asked in waiting:
            asked.fail(PeerUnavailable(self.address, cause))
        self._outcomes.fail(PeerUnavailable(self.address, cause))
        self._landings.fail(PeerUnavailable(self.address, cause))
        self._retractions.clear()

    def expire(self, now: float, limit_s: float) -> float | None:
        """Fails the calls whose deadline has passed; late answers are still read. Returns the next deadline."""
        following: float | None = None
        for asked in list(self._open.values()):
            if asked.deadline <= now:
                asked.fail(DeadlineExceeded(f"answer to {name_of(asked.call)}", "call_timeout_s", limit_s))
            elif following is None or asked.deadline < following:
                following = asked.deadline
        return following

    # --- reading answers ------------------------------------------------------------------------------------------

    def pending(self, pending: PendingOutcome, *, exact: bool = False) -> None:
        """A call was answered; when its outcome is not known yet it comes with a later Advanced."""
        if pending.outcome is None:
            self._outcomes.expect(pending, exact=exact)

    def landings(self, asked: Asked[Any], answer: Acquired | Loaded) -> tuple[Landing, ...]:
        """The copies that must land before the pages of this call can be read; its own is the last."""
        found = self._landings_of(asked, answer)
        if isinstance(answer, Acquired) and answer.lease:
            self._retractions.hold(answer.lease, found)
        elif isinstance(answer, Loaded) and answer.pages and self._lockstep:
            self._retractions.follow(found[-1])
        return found

    def _landings_of(self, asked: Asked[Any], answer: Acquired | Loaded) -> tuple[Landing, ...]:
        own, call = asked.landing, asked.call
        assert own is not None
        assert isinstance(call, Acquire | LoadBack)
        pages = sum([count for _, count in answer.loaded]) if isinstance(answer, Acquired) else answer.pages
        if call.landed or not answer.outcome:
            self._landings.end(own, answer.operation, answer.error)
            return (own,)
        shared = isinstance(answer, Acquired) and answer.host_pages > pages
        earlier = self._landings.earlier(own) if shared else ()
        if pages:
            self._landings.follow(own, answer.operation)
        else:
            self._landings.end(own, answer.operation)
        return (*earlier, own)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _begin_life(self, number: int) -> None:
        """An engine registers, once more perhaps: what was granted before the group began anew stays void."""
        self._registered_at = number
        if self._renewed:
            self._renewed = False
            self._void_through = number

    def _enqueue(self, asked: Asked[Any]) -> None:
        if isinstance(asked.call, Release):
            self._retractions.release(asked.call.lease)
        self._number += 1
        asked.number = self._number
        self._open[self._number] = asked
        self._queue.append((self._number, asked.call))

    def _take(self, number: int, answer: Answer) -> None:
        asked = self._open.pop(number, None)
        if asked is None:
            if number == NOBODY and isinstance(answer, Failed):
                self.lose(f"could not read a message: {exception_of(answer)}")
            self.answers_unasked += 1
            return
        if type(answer) is Failed:
            self._fail(asked, exception_of(answer))
            return
        if type(answer) is Advanced:
            self._advanced(answer)
        elif type(answer) is Opened:
            self._lockstep = answer.lockstep
        try:
            result = asked.read(asked, answer)
        except FrameError as error:
            asked.fail(PeerUnavailable(self.address, error.cause))
            raise
        else:
            if not asked.settle(result):
                self.give_back(result)
        if self._outcomes.early and not self._deferrable_open():
            self._outcomes.forget_early()

    def _fail(self, asked: Asked[Any], error: KvcoordError) -> None:
        if isinstance(error, VOTES_END) and asked.number > self._registered_at:
            self._outcomes.fail(error)
            if isinstance(error, GroupRenewed):
                self._renewed = True
                self._landings.void(error)
                self._retractions.clear()
        if asked.landing is not None:
            self._landings.end(asked.landing)
        asked.fail(error)

    def _advanced(self, answer: Advanced) -> None:
        for outcome in answer.outcomes:
            self._settle(outcome)
        if answer.broken or answer.retracted or answer.completed:
            acquiring = any(isinstance(asked.call, Acquire) for asked in self._open.values())
            self._retractions.take(answer, acquiring=acquiring)

    def _settle(self, outcome: Outcome) -> None:
        if not self._outcomes.settle(outcome) and self._deferrable_open():
            self._outcomes.keep(outcome)

    def _deferrable_open(self) -> bool:
        """Is a call unanswered whose outcome may come before its answer?"""
        return any(isinstance(asked.call, WriteThrough | Agree) for asked in self._open.values())

    def _packed(self, calls: list[tuple[int, Call]]) -> list[bytes]:
        payload = encode(Calls(calls))
        if len(payload) <= self._bytes_max:
            return [payload]
        if len(calls) > 1:
            half = len(calls) // 2
            return self._packed(calls[:half]) + self._packed(calls[half:])
        asked = self._open.pop(calls[0][0])
        fix = f"is longer than message_bytes_max={self._bytes_max} as a message: name fewer pages in one call"
        self._fail(asked, UsageError(name_of(asked.call), f"{len(payload)} bytes", fix))
        return []


def _read_anything(asked: Asked[Done], answer: Answer) -> Done:
    return Done()
