"""One HTTP connection on a transport and timers that the test drives: limits, deadlines and back-pressure."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.observability.http_connection import HttpConnection, HttpLimits
from kvcoord.observability.http_routes import Response, text

LIMITS = HttpLimits(
    connections_max=2, header_bytes_max=512, body_bytes_max=100, idle_timeout_s=60.0, request_timeout_s=5.0
)
GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


class FakeTimers:
    """`call_later` on a clock that moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.armed: list[FakeTimer] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "FakeTimer":
        timer = FakeTimer(self, self.now_s + delay_s, callback)
        self.armed.append(timer)
        return timer

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
        for timer in [timer for timer in self.armed if timer.due_s <= self.now_s]:
            self.armed.remove(timer)
            timer.callback()


class FakeTimer:
    def __init__(self, timers: FakeTimers, due_s: float, callback: Callable[[], None]) -> None:
        self.timers, self.due_s, self.callback = timers, due_s, callback

    def cancel(self) -> None:
        if self in self.timers.armed:
            self.timers.armed.remove(self)


class FakeTransport(asyncio.Transport):
    """Keeps what was written; `stuck` makes it ask for a pause at the next write, like a peer that does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: HttpConnection
        self.written = b""
        self.stuck = self.reading_paused = self.eof_sent = self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.eof_sent
        self.written += bytes(data)
        if self.stuck:
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_sent = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Harness:
    """One connection with everything around it faked."""

    def __init__(self, room: bool = True) -> None:
        self.timers, self.transport = FakeTimers(), FakeTransport()
        self.ended = 0
        routes = {"/healthz": lambda: text("ok"), "/large": lambda: Response(b"x" * 1000), "/broken": self.broken}
        self.connection = HttpConnection(routes, LIMITS, self.timers.call_later, lambda _: room, self.count_end)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    def broken(self) -> Response:
        raise ZeroDivisionError

    def count_end(self, _: HttpConnection) -> None:
        self.ended += 1

    def receive(self, data: bytes) -> bytes:
        """What the connection writes in answer to `data`."""
        before = len(self.transport.written)
        self.connection.data_received(data)
        return self.transport.written[before:]


def statuses(written: bytes) -> list[int]:
    return [int(part[:3]) for part in written.split(b"HTTP/1.1 ")[1:]]


def test_a_request_in_single_bytes_is_answered_once_and_the_connection_stays_open() -> None:
    harness = Harness()
    for index in range(len(GET)):
        harness.receive(GET[index : index + 1])
    assert statuses(harness.transport.written) == [200]
    assert harness.transport.written.endswith(b"\r\n\r\nok\n")
    assert not harness.transport.eof_sent


def test_pipelined_requests_are_answered_in_order() -> None:
    harness = Harness()
    written = harness.receive(GET + GET.replace(b"/healthz", b"/nowhere") + GET)
    assert statuses(written) == [200, 404, 200]


def test_bytes_that_trickle_do_not_extend_the_deadline_of_a_request() -> None:
    harness = Harness()
    for index in range(5):
        harness.receive(GET[index : index + 1])
        harness.timers.advance(0.99)
    assert harness.transport.written == b""
    harness.timers.advance(0.1)
    assert statuses(harness.transport.written) == [408]
    assert harness.transport.eof_sent


def test_an_answered_request_starts_the_deadline_anew_for_the_partial_one_behind_it() -> None:
    harness = Harness()
    harness.receive(GET[:5])
    harness.timers.advance(4.0)
    harness.receive(GET[5:] + GET[:5])
    harness.timers.advance(4.0)
    assert statuses(harness.receive(GET[5:])) == [200]


def test_a_silent_connection_is_closed_after_the_idle_limit_counted_from_the_last_answer() -> None:
    harness = Harness()
    harness.timers.advance(59.0)
    harness.receive(GET)
    harness.timers.advance(59.0)
    assert not harness.transport.aborted
    harness.timers.advance(1.0)
    assert harness.transport.aborted


def test_a_peer_that_does_not_read_gets_no_further_answer_until_it_reads() -> None:
    harness = Harness()
    harness.transport.stuck = True
    assert statuses(harness.receive(GET * 3)) == [200]
    assert harness.transport.reading_paused
    harness.transport.stuck = False
    harness.connection.resume_writing()
    assert statuses(harness.transport.written) == [200, 200, 200]
    assert not harness.transport.reading_paused


def test_a_peer_that_never_reads_is_cut_off() -> None:
    harness = Harness()
    harness.transport.stuck = True
    harness.receive(GET * 3)
    harness.timers.advance(5.0)
    assert harness.transport.aborted


def test_a_peer_that_does_not_close_after_the_last_answer_is_cut_off() -> None:
    harness = Harness()
    harness.receive(GET.replace(b"Host", b"Connection: close\r\nHost"))
    assert harness.transport.eof_sent
    harness.receive(b"more bytes that nobody asked for")
    assert not harness.transport.aborted
    harness.timers.advance(5.0)
    assert harness.transport.aborted


def test_the_end_of_a_connection_is_told_once_and_leaves_no_timer() -> None:
    harness = Harness()
    harness.receive(GET[:5])
    harness.connection.connection_lost(None)
    assert harness.ended == 1
    assert harness.timers.armed == []


def test_a_connection_without_room_is_told_so_and_closed() -> None:
    harness = Harness(room=False)
    assert statuses(harness.transport.written) == [503]
    assert harness.transport.closed
    assert harness.receive(GET) == b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x00\x01\x02 random \xff\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 600, 431),
        (b"GET /healthz HTTP/1.x\r\nHost: a\r\n\r\n", 400),
        (b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, 413),
        (b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", 405),
    ],
)
def test_what_is_not_a_request_within_the_limits_is_answered_once_and_closed(request_bytes: bytes, status: int) -> None:
    harness = Harness()
    assert statuses(harness.receive(request_bytes)) == [status]
    assert harness.transport.eof_sent
    assert harness.receive(GET) == b""


def test_a_small_body_is_read_past_and_the_connection_goes_on() -> None:
    harness = Harness()
    post = b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    written = harness.receive(post + GET)
    assert statuses(written) == [405, 200]
    assert b"\r\nAllow: GET, HEAD\r\n" in written


def test_head_gets_the_length_and_no_body() -> None:
    harness = Harness()
    written = harness.receive(b"HEAD /large HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"\r\nContent-Length: 1000\r\n" in written
    assert written.endswith(b"\r\n\r\n")
    assert statuses(harness.receive(GET)) == [200]


def test_an_old_client_is_answered_and_closed() -> None:
    harness = Harness()
    assert statuses(harness.receive(b"GET /healthz HTTP/1.0\r\n\r\n")) == [200]
    assert harness.transport.eof_sent


def test_a_query_does_not_hide_the_route_and_an_unknown_path_lists_the_known_ones() -> None:
    harness = Harness()
    assert statuses(harness.receive(GET.replace(b"/healthz", b"/healthz?verbose=1"))) == [200]
    assert b"/broken /healthz /large" in harness.receive(GET.replace(b"/healthz", b"/"))


def test_a_route_that_raises_is_a_500_with_the_kind_of_error_and_the_next_request_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness()
    written = harness.receive(GET.replace(b"/healthz", b"/broken") + GET)
    assert statuses(written) == [HTTPStatus.INTERNAL_SERVER_ERROR, 200]
    assert b"ZeroDivisionError" in written
    assert "route failed" in caplog.text


@settings(max_examples=200)
@given(chunks=st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([GET, GET[:9], GET[9:]])), max_size=12))
def test_no_bytes_make_a_connection_raise_or_outlive_its_deadlines(chunks: list[bytes]) -> None:
    harness = Harness()
    for chunk in chunks:
        if chunk:
            harness.receive(chunk)
    assert harness.transport.eof_sent or {200, 404, 405}.issuperset(statuses(harness.transport.written))
    harness.timers.advance(60.0)
    harness.timers.advance(60.0)
    assert harness.transport.aborted
