"""Addresses of local sockets: paths that fit, directories that exist, socket files left behind. Sends nothing."""

import errno
import os
import socket
import stat

from kvcoord.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 107
"""What fits into a `sockaddr_un` with its closing zero."""

_LOCAL_SCHEMES = ("unix://", "ipc://")


def parse_socket_path(address: str) -> str:
    """The path of `unix:///path` or `ipc:///path`. Raises `ConfigError` with the fix when it cannot be a socket."""
    scheme = next((scheme for scheme in _LOCAL_SCHEMES if address.startswith(scheme)), None)
    if scheme is None:
        raise ConfigError("address", address, "write a local address as ipc:///absolute/path or unix:///absolute/path")
    path = address.removeprefix(scheme)
    if not path.startswith("/") or "\0" in path:
        raise ConfigError("address", address, f"the path must be absolute: {scheme}/run/kvcoord/name.sock")
    size_bytes = len(os.fsencode(path))
    if size_bytes > SOCKET_PATH_BYTES_MAX:
        fix = f"the path has {size_bytes} bytes, a socket's at most {SOCKET_PATH_BYTES_MAX}: choose a shorter directory"
        raise ConfigError("address", address, fix)
    return path


def claim_socket_path(address: str) -> str:
    """Make the path of `address` free to bind, and return it.

    A socket file that nobody serves (its process was killed) is removed. Raises `ConfigError` when the directory is
    missing, when somebody serves there, or when the file is not a socket: binding would silently take it away.
    """
    path = parse_socket_path(address)
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise ConfigError("address", address, f"directory {directory} does not exist: create it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError("address", address, f"directory {directory} is not writable for this user")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISSOCK(mode):
        raise ConfigError("address", address, f"{path} exists and is not a socket: choose another path or remove it")
    if _is_served(address, path):
        raise ConfigError("address", address, "already in use: stop the process that serves it or choose another path")
    os.unlink(path)
    return path


class SocketFile:
    """The file of a socket that was just bound at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.stat(path).st_ino

    def remove(self) -> None:
        """Remove the file, unless another socket has taken its place.

        Must happen while the socket is still open: afterwards the system may give its inode to that other one.
        """
        try:
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        except FileNotFoundError:
            return


def _is_served(address: str, path: str) -> bool:
    """Whether a process listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN, errno.EINPROGRESS):
        return True
    if code in (errno.ECONNREFUSED, errno.ENOENT):
        return False
    raise ConfigError("address", address, f"cannot tell whether it is in use: {os.strerror(code)}")
