"""Watches the memory of processes over their lives, from outside."""

import os
from pathlib import Path
from typing import Final

import msgspec

SETTLED_AGE_S: Final = 20.0
"""Until then a process fills its pools and rings."""

WATCHED_AGE_S: Final = 60.0
"""A life that was shorter says nothing about growth."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Growth(msgspec.Struct, frozen=True):
    """What the longest lives of one kind of process have grown by, in bytes, after they had settled."""

    lives: int
    settled_bytes_max: int
    growth_bytes_max: int


class _Life:
    __slots__ = ("kind", "last_s", "latest", "settled", "since_s")

    def __init__(self, kind: str, since_s: float) -> None:
        self.kind, self.since_s, self.last_s = kind, since_s, since_s
        self.settled = self.latest = 0


class MemoryWatch:
    """`look` is called every second or so with the processes that there are."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}

    def look(self, now: float, processes: dict[int, str]) -> None:
        """`processes`: kind by pid."""
        for pid, kind in processes.items():
            size = resident_bytes(pid)
            if size is None:
                continue
            life = self._lives.get(pid)
            if life is None or life.kind != kind:
                life = self._lives[pid] = _Life(kind, now)
            life.last_s = now
            if now - life.since_s < SETTLED_AGE_S:
                life.settled = max(life.settled, size)
            life.latest = size

    def growth(self) -> dict[str, Growth]:
        """By kind of process, of those that have lived long enough."""
        found: dict[str, list[_Life]] = {}
        for life in self._lives.values():
            if life.last_s - life.since_s >= WATCHED_AGE_S:
                found.setdefault(life.kind, []).append(life)
        return {
            kind: Growth(
                len(lives),
                max(life.settled for life in lives),
                max(life.latest - life.settled for life in lives),
            )
            for kind, lives in sorted(found.items())
        }


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None
