"""Addresses in options: which forms exist and what is wrong with one. Opens nothing."""

import re
from typing import Final

from kvcoord.errors import ConfigError

SOCKET_PATH_BYTES_MAX: Final = 107
"""The kernel's limit on the path of a Unix socket, without the closing zero byte."""

_HOST_PORT: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5}|\*)")


def check_link(field: str, address: str, *, tcp: bool) -> None:
    """Check `unix:///path`, `ipc:///path`, or `tcp://host:port` where `tcp` allows it (port `*`: the system picks one).

    Raises:
        ConfigError: naming the field, the address and what to write instead.
    """
    scheme, separator, rest = address.partition("://")
    schemes = ("unix", "ipc", "tcp") if tcp else ("unix", "ipc")
    forms = "unix:///path, ipc:///path or tcp://host:port" if tcp else "ipc:///path or unix:///path"
    if not separator or scheme not in schemes:
        raise ConfigError(field, address, f"write {forms}")
    if scheme == "tcp":
        split_host_port(field, rest)
        return
    if not rest.startswith("/") or rest.endswith("/"):
        raise ConfigError(field, address, f"write an absolute path to the socket: {scheme}:///path")
    size_bytes = len(rest.encode())
    if size_bytes > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(field, address, f"path of {size_bytes} bytes; a socket's may have {SOCKET_PATH_BYTES_MAX}")


def check_loopback(field: str, address: str) -> None:
    """Check `host:port` with a host that only this machine can reach.

    Raises:
        ConfigError: naming the field, the address and what to write instead.
    """
    host, _ = split_host_port(field, address)
    if host not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d{1,3}){3}", host):
        raise ConfigError(field, address, "it is served without authentication: bind a loopback host, 127.0.0.1")


def split_host_port(field: str, address: str) -> tuple[str, int]:
    """`host:port` as (host, port). Port 0 and `*` are 0: the system picks one. An IPv6 host stands in brackets.

    Raises:
        ConfigError: when it is not of that form.
    """
    match = _HOST_PORT.fullmatch(address)
    port = 0 if match is None or match["port"] == "*" else int(match["port"])
    if match is None or port > 65535:
        raise ConfigError(field, address, "write host:port with a port from 0 to 65535")
    return match["host"].strip("[]"), port
