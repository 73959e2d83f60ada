"""Logs of a kvcoord process: the standard library's loggers, one line a record on standard error, as text or JSON.

Fields travel in `extra`: `logger.warning("rank lost", extra={"group": "a", "rank": 3, "operation": "load-back/7"})`.
This module knows how a record looks, not what is logged. Importing it changes nothing; `configure` does.
"""

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from kvcoord.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")

_LEADING_FIELDS: Final = ("group", "rank", "operation")
_RECORD_ATTRIBUTES: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def configure(level: str, format: str, process: str, stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (standard error when None), naming it `process`.

    `level` is one of `LEVELS`, `format` one of `FORMATS`; anything else raises ConfigError. A second call replaces
    the first; handlers that others installed stay.
    """
    if level not in LEVELS:
        raise ConfigError("log_level", level, f"use one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigError("log_format", format, f"use one of {', '.join(FORMATS)}")
    handler = _ProcessHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for earlier in [found for found in root.handlers if isinstance(found, _ProcessHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`time LEVEL process logger: message key=value ...`. Control characters are escaped, so a record is one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}"
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return f"{head}{fields}".translate(_CONTROL_CHARACTERS)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, message, then the fields of the record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, _plain(value))
        return json.dumps(line, allow_nan=False)


class _ProcessHandler(logging.StreamHandler[TextIO]):
    """The one handler that `configure` installs, and knows again."""


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller put into `extra`, group, rank and operation first, and the traceback of an exception."""
    extra = {name: value for name, value in record.__dict__.items() if name not in _RECORD_ATTRIBUTES}
    fields = {name: extra.pop(name) for name in _LEADING_FIELDS if name in extra} | extra
    if record.exc_info and record.exc_info[0] is not None:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        fields["stack"] = record.stack_info
    return fields


def _plain(value: object) -> object:
    """`value` as JSON can carry it; a number that JSON has no word for, and any other object, becomes its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {str(name): _plain(element) for name, element in value.items()}
    return str(value)
