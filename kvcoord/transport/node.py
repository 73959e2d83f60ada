"""Links between processes of one node: Unix stream sockets at `unix:///path`, with no thread of their own.

A send goes straight into the peer's socket, and one wake-up of the event loop drains every socket that has something: a
ZeroMQ message passes an I/O thread on both ends instead. What is promised is the same (see `link`): peers have
identities, a connection comes back by itself, the queues are bounded.

The listener greets whoever connects; the connection introduces itself by its identity, at once. A connection is there
when the greeting has come, so one that waits in the queue of a listener that was stopped is not. `ipc://` addresses are
ZeroMQ's where ranks and coordinators meet. As there, the permissions of the directory protect the socket.
"""

import asyncio
import threading
from contextlib import AbstractContextManager
from typing import Final

from kvcoord.transport.address import parse_socket_path
from kvcoord.transport.link import (
    Absent,
    Connected,
    ConnectionBatch,
    LinkLimits,
    ListenerBatch,
    Lost,
    Parted,
    PeerLost,
    check_identity,
)
from kvcoord.transport.node_connection import NodeConnection
from kvcoord.transport.node_listener import NodeListener

SCHEME: Final = "unix://"


class NodeTransport:
    """Opens listeners and connections at `unix:///path`.

    `guard` is held while the event loop runs anything of a connection. Another thread that holds it may call `send` and
    `borrow`; by default it is a lock that nobody else knows.
    """

    def __init__(self, guard: AbstractContextManager[object] | None = None) -> None:
        self._guard = threading.RLock() if guard is None else guard

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> NodeListener:
        """As `link.Transport.open_listener`. A socket file left behind by a killed process is replaced."""
        listener = NodeListener(address, on_batch=on_batch, on_lost=on_lost, limits=limits)
        listener.start()
        return listener

    async def open_connection(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
        on_absent: Absent | None = None,
    ) -> NodeConnection:
        """As `link.Transport.open_connection`; connects, and connects again after a loss, in the background."""
        parse_socket_path(address)
        check_identity(identity)
        connection = NodeConnection(
            address,
            identity,
            on_batch=on_batch,
            on_connected=on_connected,
            on_lost=on_lost,
            on_absent=on_absent,
            limits=limits,
            guard=self._guard,
        )
        asyncio.get_running_loop().call_soon(connection.start)
        return connection
