"""What a test process has open, seen so that it does not matter what other threads open and close meanwhile."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise


def open_files() -> list[str]:
    """What each descriptor of this process stands for. A thread may close one while they are read."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return names


def own_threads() -> list[str]:
    """The threads that kvcoord has started in this process, by name. Others come and go as they like."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvcoord"))


def grows(counts: Sequence[int]) -> bool:
    """The lowest count of each quarter is above that of the one before: a leak, not what comes and goes."""
    quarter = len(counts) // 4
    lowest = [min(counts[start : start + quarter]) for start in range(0, len(counts), quarter)]
    return all(later > earlier for earlier, later in pairwise(lowest))
