"""Request traces: one JSON object a line, in the format of the public Mooncake traces (FAST'25).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is milliseconds since the start of the trace, lengths are tokens, and `hash_ids` names the prompt's pages of
512 tokens in order, the last one perhaps partly filled: equal ids are equal pages. This module reads, writes and
counts traces. It does not know where they come from (`generate`) or how they are played.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import Meta

from kvcoord.domain import PageKey
from kvcoord.errors import UsageError
from kvcoord.index.keys import block_page_keys

DEMO: Final = Path(__file__).parent / "data" / "demo.jsonl"
"""The small trace that ships with the package: `generate(PRESETS["demo"], seed=0)`."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Request(msgspec.Struct, frozen=True, gc=False, rename={"timestamp_ms": "timestamp"}):
    """One request: when it arrives, its lengths in tokens, and the pages of its prompt (at least one)."""

    timestamp_ms: Count
    input_length: Count
    output_length: Count
    hash_ids: Annotated[tuple[Count, ...], Meta(min_length=1)]

    @property
    def keys(self) -> list[PageKey]:
        """The page keys of the prompt, one for each of `hash_ids`. Computed anew at each access."""
        return block_page_keys(self.hash_ids)


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace asks of a cache whose pools never fill.

    `pages_hit`: pages that their request finds cached, which are the leading pages that an earlier request had too.
    """

    requests: int
    pages: int
    pages_distinct: int
    pages_hit: int
    duration_ms: int

    @property
    def hit_ratio(self) -> float:
        return self.pages_hit / self.pages if self.pages else 0.0


def read(path: Path | str, limit: int | None = None) -> list[Request]:
    """Read a trace, or its first `limit` requests: lines after those are not looked at. Empty lines are skipped.

    Raises UsageError naming file, line and field when the file cannot be opened, a line is not a request, or a
    timestamp is smaller than the one before it.
    """
    if limit is not None and limit < 0:
        raise UsageError("limit", limit, "give a number of requests >= 0, or none for the whole trace")
    try:
        with open(path, "rb") as file:
            return list(islice(_requests(file, path), limit))
    except OSError as error:
        raise UsageError("trace", str(path), f"cannot be read ({error.strerror}); give a file that can") from error


def write(path: Path | str, requests: Iterable[Request]) -> int:
    """Write `requests` as a trace, replacing the file, and return how many they were.

    Raises UsageError when the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    count = 0
    try:
        with open(path, "wb") as file:
            for request in requests:
                file.write(encode(request) + b"\n")
                count += 1
    except OSError as error:
        raise UsageError("trace", str(path), f"cannot be written ({error.strerror}); give another path") from error
    return count


def statistics(requests: Iterable[Request]) -> Statistics:
    """Count requests, pages and hits. Keeps one key for each distinct page."""
    seen: set[PageKey] = set()
    count = pages = hits = first_ms = last_ms = 0
    for request in requests:
        keys = request.keys
        hits += next((depth for depth, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        if count == 0:
            first_ms = request.timestamp_ms
        last_ms = request.timestamp_ms
        count += 1
        pages += len(keys)
    return Statistics(
        requests=count, pages=pages, pages_distinct=len(seen), pages_hit=hits, duration_ms=last_ms - first_ms
    )


def _requests(file: BinaryIO, path: Path | str) -> Iterator[Request]:
    decode = msgspec.json.Decoder(Request, strict=True).decode
    previous_ms = 0
    for line_number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            request = decode(line)
        except msgspec.ValidationError as error:
            raise _refused_line(path, line_number, line, error) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fix = f"not JSON ({error}); write one JSON object a line"
            raise UsageError(f"{path}:{line_number}", _excerpt(line), fix) from error
        if request.timestamp_ms < previous_ms:
            fix = f"earlier than {previous_ms} on the line before; sort the lines by timestamp"
            raise UsageError(f"{path}:{line_number}: timestamp", request.timestamp_ms, fix)
        previous_ms = request.timestamp_ms
        yield request


def _refused_line(path: Path | str, line_number: int, line: bytes, error: msgspec.ValidationError) -> UsageError:
    """The decoder says which field it refused only in its sentence: a path such as `$.hash_ids[...]`, or a name."""
    named = re.search(r"at `\$\.(\w+)|field `(\w+)`", str(error))
    field = next(filter(None, named.groups())) if named else "request"
    what = str(error).split(" - at ")[0]
    fix = (
        f"{what}; a request has timestamp, input_length, output_length (integers >= 0) and hash_ids (one or more such)"
    )
    return UsageError(f"{path}:{line_number}: {field}", _excerpt(line), fix)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."
