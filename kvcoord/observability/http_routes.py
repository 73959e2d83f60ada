"""What the HTTP port answers: `/healthz`, `/readyz`, `/metrics`, `/status`, `/config`, `/events`.

A route is a function without arguments that returns a `Response` at once. It runs on the event loop of the process
it describes, so it must not wait. This module knows no socket and no HTTP framing.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec

from kvcoord.observability.snapshot import Snapshot

TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The Prometheus text format that `metrics` renders."""
JSON: Final = "application/json"
EVENTS: Final = "application/x-ndjson"


class Response(msgspec.Struct, frozen=True):
    """A whole answer; the server adds the framing."""

    body: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[], Response]


def text(line: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A plain text answer; the line end is added."""
    return Response(f"{line}\n".encode(errors="backslashreplace"), TEXT, status)


def process_routes(
    not_ready: Callable[[], str],
    metrics: Callable[[], bytes],
    status: Callable[[], Snapshot],
    config: Callable[[], str],
    events: Callable[[], bytes],
) -> dict[str, Route]:
    """The routes of a kvcoord process.

    `not_ready` returns the reason why it is not ready, empty when it is; `metrics` the exposition text; `status` a
    snapshot, sent as JSON; `config` the resolved configuration as text; `events` what the flight recorder holds, as the
    text of a dump.
    """

    def readyz() -> Response:
        reason = not_ready()
        return text(f"not ready: {reason}", HTTPStatus.SERVICE_UNAVAILABLE) if reason else text("ready")

    return {
        "/healthz": lambda: text("ok"),
        "/readyz": readyz,
        "/metrics": lambda: Response(metrics(), METRICS),
        "/status": lambda: Response(msgspec.json.format(msgspec.json.encode(status())) + b"\n", JSON),
        "/events": lambda: Response(events(), EVENTS),
        "/config": lambda: text(config().rstrip("\n")),
    }
