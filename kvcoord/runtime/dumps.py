"""Where a process writes its flight recorder, and that it did. Knows no reason to."""

import sys
from pathlib import Path

from kvcoord.errors import UsageError
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.directory import private_directory
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
            print(f"kvcoord: flight recorder written to {path}", file=sys.stderr, flush=True)


def dumps_directory() -> Path:
    """The folder that is used when none is configured. Raises UsageError as `private_directory` does."""
    return private_directory() / "dumps"
