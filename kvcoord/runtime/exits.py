"""What a process ends with: the exit codes of every command, and the one line that says why. Knows no process."""

import sys
from enum import IntEnum

from kvcoord.errors import Diverged, GroupLost, JoinRefused, KvcoordError, UsageError


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    """A wrong option or configuration, an address that is taken."""
    REFUSED = 3
    """The coordinator does not have this rank."""
    LOST = 4
    """The group did not come together in time, or its ranks differ."""


def exit_code(error: KvcoordError) -> Exit:
    """The code that stands for an error."""
    if isinstance(error, UsageError):
        return Exit.USAGE
    if isinstance(error, JoinRefused):
        return Exit.REFUSED
    if isinstance(error, GroupLost | Diverged):
        return Exit.LOST
    return Exit.FAILURE


def report(error: KvcoordError) -> Exit:
    """Say on standard error, in one line, what went wrong. Returns the exit code."""
    print("kvcoord:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return exit_code(error)


def cause_of(error: BaseException) -> KvcoordError | None:
    """The first error of this package in `error` or, when tasks failed together, in its group. None for a defect."""
    if isinstance(error, KvcoordError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [cause_of(part) for part in error.exceptions]
        return None if None in found else found[0]
    return None
