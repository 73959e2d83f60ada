"""The folder of this user for whatever kvcoord leaves on a host while it runs."""

import os
import stat
import tempfile
from pathlib import Path

from kvcoord.errors import UsageError


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
