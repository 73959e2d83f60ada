"""Answers that read the same for the async and the blocking client. Pure."""

from typing import Any

import msgspec

from kvcoord.client.results import Allocation, Match, expect
from kvcoord.client.session import Asked
from kvcoord.errors import FrameMalformed
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol.local import (
    Advanced,
    Agreed,
    Allocated,
    Answer,
    Done,
    Evicted,
    Matched,
    Opened,
    Outcome,
    Registered,
    StatusBody,
    Written,
)


def read_opened(_: Asked[Opened], answer: Answer) -> Opened:
    info = expect(answer, Opened)
    shapes = {len(info.page_bytes), len(info.layers), len(info.dtypes), len(info.parts or info.pools)}
    if not info.pools or shapes != {len(info.pools)}:
        raise FrameMalformed(f"names {len(info.pools)} pools, and not one shape for each", 0)
    return info


def read_registered(_: Asked[Registered | None], answer: Answer) -> Registered | None:
    """None: the memory is this host's, and there are no events."""
    if isinstance(answer, Registered):
        return answer
    expect(answer, Done)
    return None


def read_done(_: Asked[None], answer: Answer) -> None:
    expect(answer, Done)


def read_match(_: Asked[Match], answer: Answer) -> Match:
    found = expect(answer, Matched)
    return Match(found.device_pages, found.host_pages)


def read_allocation(_: Asked[Allocation], answer: Answer) -> Allocation:
    found = expect(answer, Allocated)
    return Allocation(found.outcome, found.slots)


def read_evicted(_: Asked[int], answer: Answer) -> int:
    return expect(answer, Evicted).pages


def read_advanced(_: Asked[Advanced], answer: Answer) -> Advanced:
    return expect(answer, Advanced)


def read_status(_: Asked[WorkerSnapshot], answer: Answer) -> WorkerSnapshot:
    try:
        return msgspec.json.decode(expect(answer, StatusBody).body, type=WorkerSnapshot)
    except msgspec.MsgspecError as error:
        raise FrameMalformed(f"status cannot be read: {error}", 0) from None


def decided(asked: Asked[Any], answer: Answer) -> tuple[str, Outcome | None, bool]:
    """Of a write or a vote: its operation, the outcome if it is known, and whether the id is the caller's own."""
    if isinstance(answer, Agreed):
        return getattr(asked.call, "operation", ""), answer.outcome, True
    written = expect(answer, Written)
    return written.operation, written.outcome, False
