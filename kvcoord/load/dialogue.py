"""What a replay and its engine drivers say to each other: one JSON object a line, over the driver's stdin and stdout.

    replay -> driver    DriverPlan, Start, then Settled for each Settling; the end of the input ends the driver
    driver -> replay    Ready, Progress..., Settling..., then DriverReport or DriverFailed

Structs, and the two ends of a line.
"""

import select
from typing import BinaryIO, Final, Generic, TypeVar

import msgspec

from kvcoord.domain import Aborted
from kvcoord.errors import PeerUnavailable
from kvcoord.protocol.local import Failed

EXPLAINED: Final = 9
"""Exit code of a process that could not go on and has said why, with DriverFailed."""


class DriverPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What one rank's engine plays.

    `pages_that_fit` is the smallest device pool of the group. `alone`: ranks decide for themselves, so this engine
    cannot know from its own answers when the others have settled. `bytes_of`: the rank whose bytes it computes, for all
    that hold the same. `upstream_fd` and `downstream_fd` are inherited
    sockets to the pipeline stages before and after, -1 for none. `full_pages_only`: paths end before their last page,
    which seldom is full, for that is where the next request of a conversation goes on.
    """

    rank: int
    bytes_of: int
    address: str
    trace: str
    requests_max: int | None
    lag: int
    pages_that_fit: int
    settle: bool
    full_pages_only: bool
    speed_up: float
    jitter_s: float
    alone: bool
    call_timeout_s: float
    upstream_fd: int
    downstream_fd: int
    progress: bool


class Start(msgspec.Struct, frozen=True, tag="start"):
    """All drivers are ready. `at_s` is the moment 0 of the trace on the system's monotonic clock."""

    at_s: float


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """Whether no rank has an operation open after this step."""

    everywhere: bool


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The driver is connected to its worker."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Requests that are done."""

    requests: int


class Settling(msgspec.Struct, frozen=True, tag="settling"):
    """Operations open after a settling step. Answered with Settled once every rank has said its number."""

    operations_open: int


class DriverFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The driver cannot go on."""

    failure: Failed


class Tally(msgspec.Struct, kw_only=True):
    """What one engine has counted. Ranks in agreement count the same, except `pages_corrupt` and `loads_failed`.

    Hits are pages that a request found cached: on device, or on the host alone. A request that was aborted for lack
    of device pages and tried again counts once; `skipped` ones were given up. `repeats` are requests computed once more
    since a load-back that they read was retracted. `aborts_first` is the first abort for each reason.
    """

    requests: int = 0
    skipped: int = 0
    retries: int = 0
    repeats: int = 0
    steps: int = 0
    pages_total: int = 0
    pages_hit_device: int = 0
    pages_hit_host: int = 0
    pages_loaded: int = 0
    pages_verified: int = 0
    pages_corrupt: int = 0
    loads_failed: int = 0
    aborts_first: dict[str, Aborted] = {}


class DriverReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """One engine's run. Times of steps with a request, in nanoseconds: blocked in the client for the whole message
    pair, and until the answer to `advance` was there. `steps` counts the others too."""

    rank: int
    tally: Tally
    seconds: float
    step_ns: list[int]
    advance_ns: list[int]


FromReplay = Start | Settled
FromDriver = Ready | Progress | Settling | DriverReport | DriverFailed

T = TypeVar("T")

_ENCODER: Final = msgspec.json.Encoder()


def line(message: msgspec.Struct) -> bytes:
    """One message as it travels."""
    return _ENCODER.encode(message) + b"\n"


class Lines(Generic[T]):
    """The driver's end: messages of `union` come in, any go out. Blocks."""

    def __init__(self, union: object, source: BinaryIO, sink: BinaryIO) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        self._source = source
        self._sink = sink

    def say(self, message: msgspec.Struct) -> None:
        self._sink.write(line(message))
        self._sink.flush()

    def hear(self) -> T:
        """The next message. Raises PeerUnavailable when the replay is gone."""
        text = self._source.readline()
        if not text:
            raise PeerUnavailable("replay", "has ended")
        return self._decoder.decode(text)

    def rest(self, seconds: float) -> None:
        """Sleeps, but not past the end of the replay: raises PeerUnavailable then. Nothing is said meanwhile."""
        if select.select([self._source], [], [], seconds)[0]:
            raise PeerUnavailable("replay", "has ended")

    def wait_for_end(self) -> None:
        """Returns when the replay has closed its end."""
        while self._source.readline():
            pass
