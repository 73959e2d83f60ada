"""Reads flight recorders: one operation's life on all ranks in order, and the first event at which two ranks part.

Takes dumps as they were read back; knows the kinds of events that `runtime.recording` writes, and opens no file. The
clock of the events is shared by the processes of one host: dumps of several hosts are each in order, not together.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvcoord.domain import Aborted, OperationId, Outcome, Reason
from kvcoord.observability.recorder import Dump, Entry
from kvcoord.protocol.messages import (
    Ack,
    Completion,
    Decision,
    Frame,
    Numbered,
    StreamAck,
    StreamVote,
    Verdict,
    Vote,
)

LIMITS: Final = {
    Reason.VOTE_TIMEOUT: "timeouts.vote_timeout_s, in rounds timeouts.round_timeout_s",
    Reason.COPY_TIMEOUT: "timeouts.copy_timeout_s",
    Reason.RANK_LOST: "timeouts.heartbeat_timeout_s",
    Reason.COORDINATOR_LOST: "timeouts.heartbeat_timeout_s",
    Reason.LIMIT: "limits.operations_open_max",
    Reason.HOST_FULL: "host_pages",
    Reason.DEVICE_FULL: "device_pages",
    Reason.AUXILIARY_FULL: "device_slots and host_slots of the pools that keep only the end of a sequence",
}
"""The option that bounds what ran out."""

CONTEXT: Final = frozenset(
    {
        "activate",
        "suspended",
        "member_lost",
        "member_left",
        "divergence",
        "failed",
        "round_without",
        "prepare",
        "rejoin",
        "hello",
    }
)
"""Events of the whole group that are told with an operation when they happen during its life."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a story. `at_s` counts from the first. `process` names who wrote it down."""

    at_s: float
    process: str
    kind: str
    text: str


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where two recorders part. `common` events that both still hold are equal before it.

    `first` and `second` are what each has next, None for nothing more. Both None: they do not part.
    """

    common: int
    last_common: str
    first: str | None
    second: str | None

    @property
    def parted(self) -> bool:
        """Whether both have gone on, and differently. One that is only behind has not parted."""
        return self.first is not None and self.second is not None


def story(dumps: Iterable[Dump], operation: OperationId, group: str = "") -> list[Line]:
    """Everything that the processes wrote down about one operation, in order. Empty when nothing is held.

    `group` leaves out what a coordinator wrote about other groups.
    """
    events = sorted(_events(dumps, group), key=lambda event: (event[1].now_s, event[0], event[1].index))
    told: list[tuple[str, Entry, str]] = []
    around: list[tuple[str, Entry, str]] = []
    for process, entry in events:
        texts = list(_about(entry, operation))
        told += [(process, entry, text) for text in texts]
        if not texts and entry.kind in CONTEXT:
            around.append((process, entry, _plain(entry.detail)))
    if not told:
        return []
    first_s, last_s = told[0][1].now_s, told[-1][1].now_s
    told += [event for event in around if first_s <= event[1].now_s <= last_s]
    told.sort(key=lambda event: (event[1].now_s, event[0], event[1].index))
    return [
        Line(at_s=entry.now_s - first_s, process=process, kind=entry.kind, text=text) for process, entry, text in told
    ]


def part(first: Dump, second: Dump) -> Parting | None:
    """The first event that two ranks did not apply alike. None when what they hold has nothing in common."""
    one, other = _applied(first), _applied(second)
    shared = {digest for _, digest in one} & {digest for _, digest in other}
    if not shared:
        return None
    at_one, at_other = (max(i for i, (_, digest) in enumerate(log) if digest in shared) for log in (one, other))
    after_one = one[at_one + 1][0] if at_one + 1 < len(one) else None
    after_other = other[at_other + 1][0] if at_other + 1 < len(other) else None
    return Parting(common=len(shared), last_common=one[at_one][0], first=after_one, second=after_other)


def explain_abort(reason: Reason, rank: int, shortfall: dict[str, int]) -> str:
    """Which rank, which limit, how short."""
    who = f"rank {rank}" if rank >= 0 else "no single rank"
    short = "".join(f", {pool} short by {count} pages" for pool, count in sorted(shortfall.items()))
    limit = LIMITS.get(reason)
    return f"{reason}: {who}{short}" + (f" (limit: {limit})" if limit else "")


# --- reading entries --------------------------------------------------------------------------------------------------


def _events(dumps: Iterable[Dump], group: str) -> Iterator[tuple[str, Entry]]:
    """Each event once, however many dumps of its process hold it."""
    seen: set[tuple[str, int, int]] = set()
    lives: dict[str, dict[int, str]] = {}
    for dump in dumps:
        header = dump.header
        pids = lives.setdefault(header.process, {})
        name = pids.setdefault(header.pid, header.process if not pids else f"{header.process} (process {header.pid})")
        for entry in dump.entries:
            key = (header.process, header.pid, entry.index)
            if key not in seen and not (group and _group_of(entry) not in ("", group)):
                seen.add(key)
                yield name, entry


def _peer(entry: Entry) -> list[str]:
    """The parts of the peer's name: group, rank, incarnation, attachment."""
    detail, encoded = entry.detail, None
    if isinstance(detail, list) and detail:
        encoded = detail[0]
    elif isinstance(detail, dict):
        encoded = detail.get("peer")
    if not isinstance(encoded, str) or not encoded:
        return []
    try:
        return base64.b64decode(encoded)[1:].decode().split("/")
    except ValueError:
        return []


def _group_of(entry: Entry) -> str:
    peer = _peer(entry)
    return peer[0] if len(peer) > 1 else ""


def _about(entry: Entry, operation: OperationId) -> Iterator[str]:
    """What one event says about an operation."""
    read = _READERS.get(entry.kind)
    if read is not None:
        peer = _peer(entry)
        by = f"rank {peer[1]} " if len(peer) > 1 else ""
        try:
            yield from (f"{by}{text}" if by and entry.kind in _FROM_RANKS else text for text in read(entry, operation))
        except msgspec.ValidationError:
            yield f"{by}{_plain(entry.detail)}"
    elif entry.operation == operation:
        yield _plain(entry.detail)


def _message(entry: Entry, kind: type[Any]) -> Any:
    assert isinstance(entry.detail, list)
    return msgspec.convert(entry.detail[1], kind)


def _frame(entry: Entry, operation: OperationId) -> Iterator[str]:
    frame: Frame = _message(entry, Frame)
    for vote in frame.votes:
        if vote.operation == operation:
            yield f"{_vote_text(vote)}, with frame {frame.round}"
    for ack in frame.acks:
        if ack.operation == operation:
            yield f"{_ack_text(ack)}, with frame {frame.round}"


def _verdict(entry: Entry, operation: OperationId) -> Iterator[str]:
    verdict: Verdict = _message(entry, Verdict)
    entries: list[Decision | Completion] = [*verdict.decisions, *verdict.completions]
    for said in entries:
        if said.operation == operation:
            yield f"{_entry_text(said)}, with verdict {verdict.round}"


def _numbered(entry: Entry, operation: OperationId) -> Iterator[str]:
    numbered: Numbered = _message(entry, Numbered)
    if numbered.entry.operation == operation:
        yield f"{_entry_text(numbered.entry)}, number {numbered.entry.sequence}"


def _stream_vote(entry: Entry, operation: OperationId) -> Iterator[str]:
    if entry.operation == operation:
        yield _vote_text(_message(entry, StreamVote).vote)


def _stream_ack(entry: Entry, operation: OperationId) -> Iterator[str]:
    if entry.operation == operation:
        yield _ack_text(_message(entry, StreamAck).ack)


def _applied_event(entry: Entry, operation: OperationId) -> Iterator[str]:
    if entry.operation == operation and isinstance(entry.detail, list):
        yield f"{entry.detail[0]} (digest {int(entry.detail[1]):016x})"


def _answered(entry: Entry, operation: OperationId) -> Iterator[str]:
    if entry.operation != operation:
        return
    detail = entry.detail
    if isinstance(detail, dict) and detail.get("type") == "aborted":
        aborted = msgspec.convert(detail, Aborted)
        yield f"aborted ({aborted.path}), {explain_abort(aborted.reason, aborted.rank, aborted.shortfall)}"
    elif isinstance(detail, dict):
        yield f"committed ({detail.get('path')})"


_FROM_RANKS: Final = frozenset({"frame", "vote", "ack"})

_READERS: Final[dict[str, Callable[[Entry, OperationId], Iterator[str]]]] = {
    "frame": _frame,
    "verdict": _verdict,
    "entry": _numbered,
    "vote": _stream_vote,
    "ack": _stream_ack,
    "applied": _applied_event,
    "answered": _answered,
}


def _vote_text(vote: Vote) -> str:
    if vote.yes:
        return "votes yes" if vote.value is None else f"votes {_plain(vote.value)}"
    return f"votes no, {explain_abort(vote.reason or Reason.REFUSED, -1, vote.shortfall)}".replace(
        ": no single rank", ""
    )


def _ack_text(ack: Ack) -> str:
    return "acks its copy" if ack.ok else f"says its copy failed ({ack.reason})"


def _entry_text(entry: Decision | Completion) -> str:
    if isinstance(entry, Completion):
        if entry.ok:
            return "COMPLETE"
        drained = "" if entry.drained else ", others still copy"
        return f"RETRACT, {explain_abort(entry.reason or Reason.COPY_FAILED, entry.rank, {})}{drained}"
    if entry.outcome is Outcome.COMMIT:
        return "COMMIT" if entry.value is None else f"COMMIT {_plain(entry.value)}"
    return f"ABORT, {explain_abort(entry.reason or Reason.REFUSED, entry.rank, entry.shortfall)}"


def _applied(dump: Dump) -> Sequence[tuple[str, int]]:
    """What a rank applied, with the digest after each. Only its present history: after a new one digests begin anew."""
    return [
        (str(entry.detail[0]), int(entry.detail[1]))
        for entry in dump.entries
        if entry.kind == "applied" and isinstance(entry.detail, list)
    ]


def _plain(detail: object) -> str:
    """A detail in one line, short."""
    if detail is None:
        return ""
    if isinstance(detail, dict):
        return ", ".join(f"{name} {_plain(value)}" for name, value in detail.items() if name != "peer")
    text = detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."
