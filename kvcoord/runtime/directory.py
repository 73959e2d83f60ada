"""The folder of this user for whatever kvcoord leaves on a host while it runs."""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvcoord.errors import UsageError


def private_directory() -> Path:
    """The folder of this user for sockets and dumps, made when it is missing; nobody else can enter it.

    Raises UsageError when somebody else has put something there.
    """
    path = _path()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UsageError("directory", str(path), f"cannot be made: {error.strerror}") from error
    if not _is_private(found):
        raise UsageError("directory", str(path), "must be a folder that only this user may enter: remove it")
    return path


def private_entries() -> list[Path]:
    """What is in that folder now, in order of name. It is not made, and not looked into when it is somebody else's."""
    path = _path()
    try:
        return sorted(path.iterdir()) if _is_private(path.lstat()) else []
    except OSError:
        return []


def make_private_folder(prefix: str) -> Path:
    """A new folder in the private one, for `remove_private_folder`. Raises UsageError as `private_directory` does."""
    while True:
        # Another process that ends may just have taken the private folder away, since it found nothing in it.
        with suppress(FileNotFoundError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=private_directory()))


def remove_private_folder(folder: Path) -> None:
    """Takes such a folder away with all that is in it, and the private one too if nothing else is there."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def _path() -> Path:
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"kvcoord-{os.getuid()}"


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
