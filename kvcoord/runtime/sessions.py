"""The sessions of a worker: who is connected, and what is to be told to whom.

Answers collect until `flush`, so that a session gets all of one wake-up in one message, or in as many as the size limit
asks for. A session that does not read loses its connection: nothing is dropped silently, and nothing piles up.
"""

import logging
from collections.abc import Callable, Iterator

from kvcoord.errors import UsageError
from kvcoord.protocol.codec import encode
from kvcoord.protocol.local import Answer, Answers, Landed, failed
from kvcoord.transport.link import LinkLimits, ListenerBatch, SendResult
from kvcoord.transport.unix import UnixListener, UnixTransport

log = logging.getLogger(__name__)

NOBODY = 0
"""Number of a call that could not be read, and of the session of no engine."""


class Sessions:
    """Numbers the listener's peers. `on_full` is told of a session that was closed because it did not read."""

    def __init__(self, limits: LinkLimits, on_full: Callable[[], None]) -> None:
        self._limits = limits
        self._on_full = on_full
        self._listener: UnixListener | None = None
        self._peers: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._last = NOBODY
        self._answers: dict[int, list[tuple[int, Answer]]] = {}

    async def open(
        self, transport: UnixTransport, address: str, on_batch: ListenerBatch, on_lost: Callable[[bytes, str], None]
    ) -> None:
        """Serves at this address. Raises ConfigError when it cannot be used."""
        self._listener = await transport.open_listener(address, on_batch=on_batch, on_lost=on_lost, limits=self._limits)

    async def close(self) -> None:
        """Delivers what is queued for at most the linger time."""
        if self._listener is not None:
            await self._listener.close()

    @property
    def address(self) -> str:
        """Where sessions connect to, empty before `open`."""
        return self._listener.address if self._listener is not None else ""

    def number(self, peer: bytes) -> int:
        """The session of this peer, a new one when it has not been heard before."""
        session = self._numbers.get(peer)
        if session is None:
            self._last += 1
            session = self._numbers[peer] = self._last
            self._peers[session] = peer
        return session

    def forget(self, peer: bytes) -> int | None:
        """The peer is gone. Returns the session it had."""
        session = self._numbers.pop(peer, None)
        if session is not None:
            del self._peers[session]
            self._answers.pop(session, None)
        return session

    def answer(self, session: int, number: int, answer: Answer) -> None:
        """An answer for the next flush; of no interest when the session is gone."""
        if session in self._peers:
            self._answers.setdefault(session, []).append((number, answer))

    def flush(self) -> Iterator[tuple[int, Answer]]:
        """Sends what has collected. Yields (session, answer) for each, after it was sent."""
        if not self._answers:
            return
        answers, self._answers = self._answers, {}
        for session, known in answers.items():
            self._send_answers(session, known)
            for _, answer in known:
                yield session, answer

    def tell(self, session: int, message: Landed) -> None:
        """A notice that answers no call."""
        self._send(session, encode(message))

    def _send_answers(self, session: int, known: list[tuple[int, Answer]]) -> None:
        payload = encode(Answers(known))
        size_bytes_max = self._limits.message_bytes_max
        if len(payload) <= size_bytes_max:
            self._send(session, payload)
        elif len(known) > 1:
            half = len(known) // 2
            self._send_answers(session, known[:half])
            self._send_answers(session, known[half:])
        else:
            fix = f"is longer than message_bytes_max={size_bytes_max}: ask for less, or raise it on both ends"
            self._send_answers(session, [(known[0][0], failed(UsageError("answer", len(payload), fix)))])

    def _send(self, session: int, payload: bytes) -> None:
        peer = self._peers.get(session)
        if peer is None or self._listener is None:
            return
        if self._listener.send(peer, payload) is SendResult.FULL:
            log.error("session %d does not read its answers: its connection is closed", session)
            self._on_full()
            self._listener.drop(peer)
