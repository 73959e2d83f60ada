"""Where a process writes its flight recorder, and that it did. Knows no reason to."""

import os
import stat
import sys
import tempfile
from pathlib import Path

from kvcoord.errors import UsageError
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.exits import report


class Dumps:
    """The recorder of one process, and its folder; None: `dumps_directory`."""

    def __init__(self, recorder: FlightRecorder, directory: str | None) -> None:
        self._recorder = recorder
        self._directory = directory

    def write(self, cause: str) -> None:
        """Writes what is held to a new file, and says on standard error where, or why it could not."""
        try:
            directory = dumps_directory() if self._directory is None else Path(self._directory)
            path = self._recorder.dump_into(directory, cause)
        except UsageError as error:
            report(error)
        else:
            print(f"kvcoord: flight recorder written to {path} ({cause})", file=sys.stderr, flush=True)


def dumps_directory() -> Path:
    """The folder that is used when none is configured. Raises UsageError as `private_directory` does."""
    return private_directory() / "dumps"


def private_directory() -> Path:
    """The folder of this user for sockets and dumps, made when it is missing; nobody else can enter it.

    Raises UsageError when somebody else has put something there.
    """
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(parent) / f"kvcoord-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UsageError("directory", str(path), f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError("directory", str(path), "must be a folder that only this user may enter: remove it")
    return path
