"""The HTTP port of a process: one listening socket, at most `connections_max` connections, no tasks.

It listens and keeps count; what a connection does is in `http_connection`, what it answers in `http_routes`.
Meant for a loopback address: it has no authentication and no TLS.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Mapping

from kvcoord.errors import ConfigError
from kvcoord.observability.http_connection import HttpConnection, HttpLimits
from kvcoord.observability.http_routes import Route

_FIXES = {
    errno.EADDRINUSE: "another process listens there: give another port, or 0 to take any free one",
    errno.EADDRNOTAVAIL: "this machine has no such address: use 127.0.0.1 or ::1",
    errno.EACCES: "this user may not listen there: give a port above 1023",
}


class HttpServer:
    """Serves `routes` (path to function) on `host`:`port`; port 0 takes any free one. Opened once, closed once."""

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], limits: HttpLimits | None = None) -> None:
        self._host, self._port = host, port
        self._routes = dict(routes)
        self._limits = HttpLimits() if limits is None else limits
        self._server: asyncio.Server | None = None
        self._connections: dict[HttpConnection, None] = {}
        self._all_closed = asyncio.Event()

    @property
    def port(self) -> int:
        """The port listened on; before `open` the port asked for."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def open(self) -> None:
        """Listen. Raises ConfigError naming the address when that is not possible."""
        loop = asyncio.get_running_loop()
        if not 0 <= self._port < 65536:
            # The resolver would take it modulo 65536, and listen somewhere else.
            raise ConfigError("http", self.address, "a port is at most 65535")
        try:
            listener = _bind(self._host, self._port)
        except (OSError, UnicodeError) as error:
            raise ConfigError("http", self.address, _fix(error)) from error
        self._port = listener.getsockname()[1]
        self._server = await loop.create_server(self._connect, sock=listener)

    async def close(self) -> None:
        """Stop listening and close every connection. Does nothing when not open."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            await self._all_closed.wait()
        await server.wait_closed()

    def _connect(self) -> HttpConnection:
        call_later = asyncio.get_running_loop().call_later
        return HttpConnection(self._routes, self._limits, call_later, self._opened, self._closed)

    def _opened(self, connection: HttpConnection) -> bool:
        self._connections[connection] = None
        self._all_closed.clear()
        return self._server is not None and len(self._connections) <= self._limits.connections_max

    def _closed(self, connection: HttpConnection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_closed.set()


def _bind(host: str, port: int) -> socket.socket:
    """One socket for the first address of `host`: with port 0, each further address would get another port."""
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _fix(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host: use 127.0.0.1 or ::1"
    if isinstance(error, OSError) and error.errno in _FIXES:
        return _FIXES[error.errno]
    return f"cannot listen there ({os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error})"
