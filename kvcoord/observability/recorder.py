"""The flight recorder: the last events of one process, in order, kept cheaply and written out when something breaks.

Recording stores references; text is made only when somebody reads. The recorder does not know what an event means:
`kind` and `detail` are the caller's. It reads no clock; the time of an event is handed in.

A dump is a file of JSON lines, a `DumpHeader` first and one `Entry` on each further line. It appears under its name
only when complete, and only its owner may read it.
"""

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

import kvcoord
from kvcoord.domain import OperationId
from kvcoord.errors import UsageError

T = TypeVar("T", bound=msgspec.Struct)
Detail = Mapping[str, object] | msgspec.Struct | tuple[object, ...] | str | None

DUMP_FORMAT: Final = 1
DUMPS_KEPT_MAX: Final = 16
"""Files that `dump_into` writes in one process life before it overwrites its oldest."""


class Entry(msgspec.Struct, frozen=True):
    """One event. `index` counts from 0 and has no gaps; `now_s` is monotonic and shared by the processes of one host.

    `operation` is empty for an event that belongs to none. `detail` read back from a file is plain JSON values.
    """

    index: int
    now_s: float
    kind: str
    operation: OperationId
    detail: object = None


class DumpHeader(msgspec.Struct, frozen=True):
    """Whose dump it is and why. `dropped` events were overwritten before the dump: entries start at that index."""

    format: int
    process: str
    pid: int
    cause: str
    version: str
    events_max: int
    dropped: int


class Dump(msgspec.Struct, frozen=True):
    """A dump as read back by `load`."""

    header: DumpHeader
    entries: list[Entry]

    def story(self, operation: OperationId) -> list[Entry]:
        """The recorded life of one operation, oldest first."""
        return _story(self.entries, operation)


class FlightRecorder:
    """A ring of the last events of `process`, used from one thread: at most `events_max`, weighed by what they hold.

    `process` names the process for a reader, for example `worker-3`. `events_max` >= 1, else UsageError.
    """

    __slots__ = ("_dumps", "_events_max", "_process", "_recorded", "_ring", "_weight")

    def __init__(self, process: str, events_max: int) -> None:
        if events_max < 1:
            raise UsageError("events_max", events_max, "keep at least one event")
        self._process = process
        self._events_max = events_max
        self._ring: deque[tuple[float, str, OperationId, Detail, int]] = deque()
        self._weight = 0
        self._recorded = 0
        self._dumps = 0

    def record(self, now_s: float, kind: str, operation: OperationId, detail: Detail = None, weight: int = 1) -> None:
        """Keep one event; the oldest make room. `detail` is kept by reference and must not change afterwards.

        `weight`: as how many events it counts, since a message with 64 votes keeps as much memory as 64 with one.
        """
        ring = self._ring
        ring.append((now_s, kind, operation, detail, weight))
        self._recorded += 1
        held = self._weight + weight
        while held > self._events_max and len(ring) > 1:
            held -= ring.popleft()[4]
        self._weight = held

    @property
    def recorded(self) -> int:
        """Events recorded in this process life."""
        return self._recorded

    @property
    def dropped(self) -> int:
        """Events already overwritten."""
        return self._recorded - len(self._ring)

    def entries(self) -> list[Entry]:
        """All events still held, oldest first."""
        return list(self._read())

    def story(self, operation: OperationId) -> list[Entry]:
        """The life of one operation as far as it is still held, oldest first. Empty when nothing is."""
        return _story(self._read(), operation)

    def dump(self, path: Path, cause: str) -> None:
        """Write everything held to `path`, replacing it as a whole, readable by the owner only.

        A missing folder is made. Raises UsageError when the file cannot be written; nothing is left behind then.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_whole(path, self._lines(cause))
        except OSError as error:
            raise UsageError("path", str(path), f"the flight recorder cannot write there: {error.strerror}") from error

    def text(self, cause: str) -> bytes:
        """What a dump's file would hold."""
        return b"".join(line + b"\n" for line in self._lines(cause))

    def dump_into(self, directory: Path, cause: str) -> Path:
        """Like `dump`, under a name made from process, pid and a number. Returns the path.

        The number starts again after `DUMPS_KEPT_MAX`, so that a fault that repeats cannot fill the disk.
        """
        name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in self._process)
        path = directory / f"{name}-{os.getpid()}-{self._dumps % DUMPS_KEPT_MAX}.jsonl"
        self.dump(path, cause)
        self._dumps += 1
        return path

    def _lines(self, cause: str) -> list[bytes]:
        header = DumpHeader(
            format=DUMP_FORMAT,
            process=self._process,
            pid=os.getpid(),
            cause=cause,
            version=kvcoord.__version__,
            events_max=self._events_max,
            dropped=self.dropped,
        )
        return [msgspec.json.encode(header), *map(_encode_entry, self._read())]

    def _read(self) -> Iterator[Entry]:
        return (Entry(index, *event[:4]) for index, event in enumerate(self._ring, self.dropped))


def load(path: Path) -> Dump:
    """Read a dump back. Raises UsageError naming the line when the file is absent or not a dump."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError("path", str(path), f"cannot read this dump: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: bytes, source: str) -> Dump:
    """The same for a text that came from `source`."""
    lines = text.splitlines()
    if not lines:
        raise UsageError("path", source, "the file is empty: a dump has a header line")
    header = _decode_line(source, 1, lines[0], DumpHeader)
    if header.format != DUMP_FORMAT:
        raise UsageError("path", source, f"dump format {header.format}; this version reads format {DUMP_FORMAT}")
    return Dump(header, [_decode_line(source, number, line, Entry) for number, line in enumerate(lines[1:], 2)])


def _story(entries: Iterable[Entry], operation: OperationId) -> list[Entry]:
    return [entry for entry in entries if entry.operation == operation]


def _decode_line(source: str, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError("path", source, f"line {number} is no {kind.__name__}: {error}") from error


def _encode_entry(entry: Entry) -> bytes:
    try:
        return msgspec.json.encode(entry, enc_hook=repr)
    except (TypeError, ValueError, RecursionError):
        # A dump is written when something is already wrong: one odd detail must not cost all the others.
        return msgspec.json.encode(msgspec.structs.replace(entry, detail={"unreadable": type(entry.detail).__name__}))


def _write_whole(path: Path, lines: Iterable[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(line + b"\n" for line in lines)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
