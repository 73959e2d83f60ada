"""Finds two accesses to the same bytes that nothing orders, in what was asked of a driver.

Four things order: a stream goes on in order; a wait comes after the record that it waits for; what the host asks for,
or touches itself, comes after whatever it has seen reached before. Whether it went well by luck does not count.
"""

from collections.abc import Sequence

from tests.dma.fake_driver import Entry, HostAccess, Range, Seen, Work

Step = Work | HostAccess


def races(log: Sequence[Entry]) -> list[tuple[Step, Step]]:
    """Pairs that touch the same bytes, at least one writing, in no order."""
    steps = [entry for entry in log if not isinstance(entry, Seen)]
    before = _order(log)
    found: list[tuple[Step, Step]] = []
    for later, step in enumerate(steps):
        for earlier in range(later):
            if not before[later] >> earlier & 1 and _conflict(steps[earlier], step):
                found.append((steps[earlier], step))
    return found


def _order(log: Sequence[Entry]) -> list[int]:
    """For each step the set, as a bit mask, of the steps that are surely over when it begins."""
    before: list[int] = []
    numbers: dict[int, int] = {}
    last_of_stream: dict[int, int] = {}
    known = 0
    for entry in log:
        if isinstance(entry, Seen):
            known |= before[numbers[id(entry.marked)]] | 1 << numbers[id(entry.marked)]
            continue
        number = len(before)
        numbers[id(entry)] = number
        over = known
        if isinstance(entry, HostAccess):
            known |= 1 << number
        else:
            for earlier in (last_of_stream.get(entry.stream), numbers.get(id(entry.marked))):
                if earlier is not None:
                    over |= before[earlier] | 1 << earlier
            last_of_stream[entry.stream] = number
        before.append(over)
    return before


def _conflict(left: Step, right: Step) -> bool:
    return (
        _overlap(left.writes, right.writes) or _overlap(left.writes, right.reads) or _overlap(left.reads, right.writes)
    )


def _overlap(left: Sequence[Range], right: Sequence[Range]) -> bool:
    return any(a < b + b_size and b < a + a_size for a, a_size in left for b, b_size in right)
