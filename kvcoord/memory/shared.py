"""Memory that two processes of one host share: an engine's device pages, and host pages that ranks keep for each other.

One creates an unnamed file in memory (a memfd) and sends a handle; the other maps the same bytes. There is
no name in the file system, so nothing is left behind however either process ends: the bytes go with the last map.
It does not know how a handle travels.
"""

import fcntl
import mmap
import os
from io import FileIO
from typing import Annotated, Final, Self

import msgspec

from kvcoord.domain import Layout
from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.memory.geometry import AtLeastOne, PoolGeometry
from kvcoord.memory.pages import PageMemory, unmappable

NotNegative = Annotated[int, msgspec.Meta(ge=0)]

NAME_LENGTH_MAX: Final = 48
"""Characters of a pool's name shown in the process's map; the kernel refuses names over 249 bytes."""


class SharedHandle(msgspec.Struct, frozen=True):
    """Names shared pages to another process of this host, for as long as process `pid` keeps them open.

    `inode` is the identity of the bytes: it tells them from what a later process with this pid has at this `fd`.
    """

    pid: AtLeastOne
    fd: NotNegative
    inode: NotNegative
    size_bytes: AtLeastOne
    geometry: PoolGeometry
    capacity: AtLeastOne


class SharedPages:
    """The creating side: `memory` is usable like any other, `handle` lets another process map the same bytes.

    Close it, not its `memory`; one that is dropped open emits a ResourceWarning.
    """

    __slots__ = ("_file", "_inode", "memory")

    def __init__(self, file: FileIO, memory: PageMemory) -> None:
        self._file = file
        self._inode = os.fstat(file.fileno()).st_ino
        self.memory = memory

    @classmethod
    def create(cls, geometry: PoolGeometry, capacity: int, layout: Layout = Layout.LAYER_FIRST) -> Self:
        """New zeroed pages. Raises ConfigError when the host cannot map them."""
        size_bytes = geometry.total_bytes(capacity)
        name = f"kvcoord-{geometry.name[:NAME_LENGTH_MAX]}"
        file = FileIO(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
        try:
            file.truncate(size_bytes)
            # A file that shrinks under a map kills the process that reads it (SIGBUS); the seal forbids that.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = PageMemory(mmap.mmap(file.fileno(), size_bytes), geometry, capacity, layout)
        except (OSError, OverflowError) as cause:
            file.close()
            raise unmappable(geometry, capacity, cause) from cause
        return cls(file, memory)

    def handle(self) -> SharedHandle:
        """What another process needs for `attach`. Raises UsageError after `close`."""
        if self._file.closed:
            raise UsageError("pages", self.memory.geometry.name, "are closed; take handles before")
        return SharedHandle(
            pid=os.getpid(),
            fd=self._file.fileno(),
            inode=self._inode,
            size_bytes=self.memory.size_bytes,
            geometry=self.memory.geometry,
            capacity=self.memory.capacity,
        )

    def close(self) -> None:
        """Unmap and forbid new attaches; maps of other processes stay. May be called again."""
        self.memory.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(handle: SharedHandle, layout: Layout = Layout.LAYER_FIRST) -> PageMemory:
    """Map the pages that `handle` names, which lie in this order. The map outlives their creator, until it is closed.

    Raises PeerUnavailable when the creator or its pages are gone, ConfigError when this process may not open them
    or the handle contradicts itself.
    """
    expected_bytes = handle.geometry.total_bytes(handle.capacity)
    if handle.size_bytes != expected_bytes:
        raise ConfigError("handle.size_bytes", handle.size_bytes, f"its geometry and capacity need {expected_bytes}")
    fd = _open_peer(handle)
    try:
        status = os.fstat(fd)
        if status.st_ino != handle.inode or status.st_size != handle.size_bytes:
            raise _gone(handle, "another file is there: the pages were closed, or another process has this pid now")
        mapping = mmap.mmap(fd, handle.size_bytes)
    except OSError as cause:
        raise _gone(handle, f"cannot be mapped ({cause})") from cause
    finally:
        os.close(fd)
    return PageMemory(mapping, handle.geometry, handle.capacity, layout)


def _open_peer(handle: SharedHandle) -> int:
    try:
        return os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except PermissionError as cause:
        fix = "belongs to another user; run the engine and its sidecar as the same user"
        raise ConfigError("handle.pid", handle.pid, fix) from cause
    except OSError as cause:
        why = "is gone, closed its pages, or is in another PID namespace (share it between engine and sidecar)"
        raise _gone(handle, f"{why}: {cause.strerror}") from cause


def _gone(handle: SharedHandle, cause: str) -> PeerUnavailable:
    return PeerUnavailable(f"pages {handle.geometry.name!r} of process {handle.pid} (fd {handle.fd})", cause)
