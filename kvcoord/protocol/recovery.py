"""What a coordinator makes of the ranks' reports: DESIGN section 4.5, checked by the failover model beside it.

A decision known to any rank is given to all; an operation in doubt everywhere is aborted; the highest verdict that any
rank has is given to all. Ranks with unequal histories hold nothing in common: they begin anew.
"""

from collections.abc import Mapping

import msgspec

from kvcoord.domain import OperationId, Rank
from kvcoord.errors import InvariantBroken
from kvcoord.protocol.messages import NO_EPOCH, Decision, Entry, Report, Verdict


class Merged(msgspec.Struct, frozen=True):
    """The union of all reports. `in_doubt`: voted on somewhere, decided nowhere, lowest rank's order first."""

    history: int
    fresh: bool
    entries: list[Entry]
    sequence: int
    in_doubt: list[OperationId]
    verdicts: list[Verdict]
    round: int
    capacity: list[int]


def merge(reports: Mapping[Rank, Report], epoch: int) -> Merged:
    """Combines the reports of all ranks of a group for the epoch that is about to begin."""
    ordered = [reports[rank] for rank in sorted(reports)]
    histories = {report.history for report in ordered}
    capacity = [min(counts) for counts in zip(*(report.free for report in ordered), strict=True)]
    if len(histories) != 1 or NO_EPOCH in histories or not _reach_each_other(ordered):
        return Merged(epoch, True, [], 0, [], [], -1, capacity)
    entries: dict[int, Entry] = {}
    verdicts: dict[int, Verdict] = {}
    for report in ordered:
        for entry in report.entries:
            held = entries.setdefault(entry.sequence, entry)
            if held != entry:
                raise InvariantBroken("one outcome per operation", f"sequence {entry.sequence}: {held} and {entry}")
        for verdict in report.verdicts:
            verdicts.setdefault(verdict.round, verdict)
    decided = {entry.operation for entry in entries.values() if isinstance(entry, Decision)}
    in_doubt = [op for report in ordered for op in report.in_doubt if op not in decided]
    return Merged(
        history=ordered[0].history,
        fresh=False,
        entries=[entries[number] for number in sorted(entries)],
        sequence=max(report.sequence for report in ordered),
        in_doubt=list(dict.fromkeys(in_doubt)),
        verdicts=[verdicts[number] for number in sorted(verdicts)],
        round=max(verdicts, default=-1),
        capacity=capacity,
    )


def _reach_each_other(reports: list[Report]) -> bool:
    """Whether every rank can be brought up to the most advanced one from what the ranks still keep."""
    newest = max(report.sequence for report in reports)
    oldest = min(report.sequence for report in reports)
    known = {entry.sequence for report in reports for entry in report.entries}
    return all(number in known for number in range(oldest + 1, newest + 1))
