"""One HTTP/1.1 connection: bytes in, answers out, a limit on everything.

h11 does the framing. There is no task and no await: a request is answered in the call that brought its last byte, so
nothing can be left running. One timer at a time watches what the connection is doing (`Phase`). The connection knows
its routes and its limits, not its listener; it learns of time only from `call_later`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from http import HTTPStatus
from typing import Final, Protocol, cast

import h11
import msgspec

from kvcoord.observability.http_routes import Response, Route, text

logger = logging.getLogger(__name__)

_METHODS: Final = (b"GET", b"HEAD")
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the server, each of them answered or closed upon, never exceeded.

    `request_timeout_s` bounds one request from its first byte to its last, one answer that the peer does not read,
    and one closing. `idle_timeout_s` bounds the silence between requests.
    """

    connections_max: int = 64
    header_bytes_max: int = 16 * 1024
    body_bytes_max: int = 64 * 1024
    idle_timeout_s: float = 60.0
    request_timeout_s: float = 5.0


class Phase(Enum):
    """What a connection waits for."""

    IDLE = auto()
    RECEIVING = auto()
    SENDING = auto()
    CLOSING = auto()


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class HttpConnection(asyncio.Protocol):
    """Serves `routes` to one peer. `opened` says whether there is room for it; `closed` is called once at its end."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        limits: HttpLimits,
        call_later: CallLater,
        opened: Callable[["HttpConnection"], bool],
        closed: Callable[["HttpConnection"], None],
    ) -> None:
        self._routes, self._limits, self._call_later = routes, limits, call_later
        self._opened, self._closed = opened, closed
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes_max)
        self._transport: asyncio.Transport
        self._request: h11.Request | None = None
        self._body_bytes = 0
        self._write_paused = False
        self._phase: Phase | None = None
        self._timer: Timer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop have these methods but not this class.
        self._transport = cast(asyncio.Transport, transport)
        if self._opened(self):
            self._watch(Phase.IDLE)
        else:
            self._phase = Phase.CLOSING
            self._transport.write(_BUSY)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._phase = Phase.CLOSING
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        # Bytes that arrive while closing are read and dropped: closing on unread bytes would reset the
        # connection and could take the last answer with it.
        if self._phase is not Phase.CLOSING:
            self._http.receive_data(data)
            self._serve()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._transport.resume_reading()
        if self._phase is not Phase.CLOSING:
            self._serve()

    def abort(self) -> None:
        """Close now; what the peer has not taken yet is lost."""
        self._transport.abort()

    def _serve(self) -> None:
        """Answer every request that is complete, unless the peer does not take the answers."""
        try:
            while self._phase is not Phase.CLOSING and not self._write_paused:
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                self._take(event)
        except h11.RemoteProtocolError as error:
            self._refuse(HTTPStatus(error.error_status_hint), str(error))
        if self._phase is not Phase.CLOSING:
            self._watch(self._waiting_for())

    def _take(self, event: object) -> None:
        if isinstance(event, h11.Request):
            self._request, self._body_bytes = event, 0
            if self._http.they_are_waiting_for_100_continue:
                self._answer(event)
        elif isinstance(event, h11.Data):
            self._body_bytes += len(event.data)
            if self._body_bytes > self._limits.body_bytes_max:
                self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no route takes a body")
        elif isinstance(event, h11.EndOfMessage):
            assert self._request is not None
            self._answer(self._request)

    def _answer(self, request: h11.Request) -> None:
        path = request.target.partition(b"?")[0].decode("ascii")
        route = self._routes.get(path)
        if route is None:
            known = " ".join(sorted(self._routes))
            response = text(f"no such route; there are: {known}", HTTPStatus.NOT_FOUND)
        elif request.method not in _METHODS:
            response = text("use GET or HEAD", HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            response = _call(path, route)
        self._send(response, with_body=request.method != b"HEAD")

    def _refuse(self, status: HTTPStatus, cause: str) -> None:
        """Answer a request that cannot be served as HTTP, and close."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(text(cause, status), with_body=True)
        else:
            self._linger()

    def _send(self, response: Response, with_body: bool) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ]
        if response.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        if self._http.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        status = response.status
        parts = [self._http.send(h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()))]
        if with_body:
            parts.append(self._http.send(h11.Data(data=response.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._phase = None
        self._transport.write(b"".join(part for part in parts if part))
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self._linger()

    def _linger(self) -> None:
        """Send the rest, say that no more comes, and wait for the peer to close as well."""
        self._watch(Phase.CLOSING)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _waiting_for(self) -> Phase:
        if self._write_paused:
            return Phase.SENDING
        mid_request = self._http.their_state is not h11.IDLE or self._http.trailing_data[0]
        return Phase.RECEIVING if mid_request else Phase.IDLE

    def _watch(self, phase: Phase) -> None:
        """Start the timer of a phase; while the phase lasts, more bytes do not extend it."""
        if phase is self._phase:
            return
        self._stop_timer()
        self._phase = phase
        limit_s = self._limits.idle_timeout_s if phase is Phase.IDLE else self._limits.request_timeout_s
        self._timer = self._call_later(limit_s, self._expire)

    def _expire(self) -> None:
        if self._phase is Phase.RECEIVING:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no whole request in {self._limits.request_timeout_s:g} s")
        else:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _call(path: str, route: Route) -> Response:
    try:
        return route()
    except Exception as error:
        logger.exception("route failed", extra={"route": path})
        return text(f"{path} failed: {type(error).__name__}", HTTPStatus.INTERNAL_SERVER_ERROR)
