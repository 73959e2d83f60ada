"""What a coordinator makes of the ranks' reports: DESIGN section 4.5, checked by the failover model beside it.

A decision known to any rank is given to all; an operation in doubt everywhere is aborted; the highest verdict that any
rank has is given to all. Ranks that cannot be brought to one state from what they still hold begin anew.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvcoord.domain import OperationId, Rank
from kvcoord.protocol.messages import NO_EPOCH, Completion, Decision, Entry, Report, Verdict
from kvcoord.protocol.rank_stream import entry_bytes

_NUMBER_BYTES: Final = 9
_VERDICT_BYTES: Final = 48
"""What a number takes at most, and a verdict beside all that it lists."""


class Conflict(msgspec.Struct, frozen=True):
    """Two ranks report different outcomes for one thing: they have diverged. `sides`: as in Divergence."""

    sides: list[list[Rank]]
    what: str


class Merged(msgspec.Struct, frozen=True):
    """The union of all reports. `in_doubt`: voted on somewhere, decided nowhere, lowest rank's order first.

    `fresh`: nothing is shared, every rank begins anew. `retracted`: retracted somewhere and not drained anywhere.
    """

    history: int
    fresh: bool
    entries: list[Entry]
    sequence: int
    in_doubt: list[OperationId]
    verdicts: list[Verdict]
    round: int
    retracted: list[Completion]
    capacity: list[int]
    conflict: Conflict | None = None


def merge(reports: Mapping[Rank, Report], epoch: int, verdicts_held_max: int = 512, bytes_max: int = 1 << 20) -> Merged:
    """Combines the reports of all ranks of a group, with equally many pools, for the epoch that is about to begin.

    No rank is to hold more than `verdicts_held_max` verdicts: one whose engine has not moved while the group went from
    one recovery to the next would need more and more of them, so the group begins anew instead. So it does when one
    lacks entries, or would hold verdicts, of more than `bytes_max` bytes: all of them go into one message.
    """
    ranks = sorted(reports)
    ordered = [reports[rank] for rank in ranks]
    capacity = [min(counts) for counts in zip(*(report.free for report in ordered), strict=True)]
    histories = {report.history for report in ordered}
    if len(histories) != 1 or NO_EPOCH in histories:
        return _anew(epoch, capacity)
    entries: dict[int, tuple[Rank, Entry]] = {}
    verdicts: dict[int, tuple[Rank, Verdict]] = {}
    for rank, report in zip(ranks, ordered, strict=True):
        for entry in report.entries:
            other, held = entries.setdefault(entry.sequence, (rank, entry))
            if held != entry:
                return _anew(epoch, capacity, _conflict(other, held, rank, entry))
        for verdict in report.verdicts:
            other, known = verdicts.setdefault(verdict.round, (rank, verdict))
            if known is not verdict and _content(known) != _content(verdict):
                return _anew(epoch, capacity, _conflict(other, known, rank, verdict))
    sequence = max(report.sequence for report in ordered)
    last_round = max(verdicts, default=-1)
    for report in ordered:
        missing = range(report.sequence + 1, sequence + 1)
        if not all(number in entries for number in missing):
            return _anew(epoch, capacity)
        if sum([entry_bytes(entries[number][1]) for number in missing]) > bytes_max:
            return _anew(epoch, capacity)
        if not _follows(report, verdicts, last_round, verdicts_held_max, bytes_max):
            return _anew(epoch, capacity)
    known_entries = [entries[number][1] for number in sorted(entries)]
    decided = {entry.operation for entry in known_entries if isinstance(entry, Decision)}
    in_doubt = [operation for report in ordered for operation in report.in_doubt if operation not in decided]
    known_verdicts = [verdicts[number][1] for number in sorted(verdicts)]
    return Merged(
        history=ordered[0].history,
        fresh=False,
        entries=known_entries,
        sequence=sequence,
        in_doubt=list(dict.fromkeys(in_doubt)),
        verdicts=known_verdicts,
        round=last_round,
        retracted=_still_copying(ordered, known_entries, known_verdicts),
        capacity=capacity,
    )


def _anew(epoch: int, capacity: list[int], conflict: Conflict | None = None) -> Merged:
    return Merged(epoch, True, [], 0, [], [], -1, [], capacity, conflict)


def _follows(
    report: Report, verdicts: Mapping[int, tuple[Rank, Verdict]], last_round: int, held_max: int, bytes_max: int
) -> bool:
    """Whether this rank can be brought up to the last round from the verdicts that the ranks still keep."""
    if report.verdict_next < 0:
        return True
    missing = range(report.verdict_next, last_round + 1)
    if not all(number in verdicts for number in missing) or len(report.verdicts) + len(missing) > held_max:
        return False
    held = [*report.verdicts, *(verdicts[number][1] for number in missing)]
    return sum(map(_verdict_bytes, held)) <= bytes_max


def _verdict_bytes(verdict: Verdict) -> int:
    """At most so long is a verdict in a message."""
    entries: list[Entry] = [*verdict.decisions, *verdict.completions]
    numbers = len(verdict.capacity) + len(verdict.absent)
    return sum(map(entry_bytes, entries)) + _NUMBER_BYTES * numbers + _VERDICT_BYTES


def _still_copying(reports: list[Report], entries: list[Entry], verdicts: list[Verdict]) -> list[Completion]:
    ended = [entry for entry in entries if isinstance(entry, Completion)]
    ended += [completion for verdict in verdicts for completion in verdict.completions]
    drained = {completion.operation for completion in ended if completion.drained}
    held = {completion.operation: completion for report in reports for completion in report.retracted}
    return [completion for operation, completion in held.items() if operation not in drained]


def _content(verdict: Verdict) -> tuple[object, ...]:
    """All but the epoch, which is renewed when a verdict is handed on."""
    return verdict.decisions, verdict.completions, verdict.capacity, verdict.absent


def _conflict(rank: Rank, known: Entry | Verdict, other: Rank, reported: Entry | Verdict) -> Conflict:
    return Conflict([[rank], [other]], f"{_name(known)} (ranks {rank}) against {_name(reported)} (ranks {other})")


def _name(known: Entry | Verdict) -> str:
    if isinstance(known, Verdict):
        return f"verdict {known.round}"
    if isinstance(known, Decision):
        return f"{known.outcome} {known.operation}"
    return f"{'complete' if known.ok else 'retract'} {known.operation}"
