"""What happens to the connections under a ZeroMQ socket, as events on the event loop. Knows no messages."""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import zmq

WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)

_EVENT = struct.Struct("=HI")

HANDSHAKE_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the connection broke during the handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: one end uses keys and the other does not, or"
    " not the right ones, or it is not a kvcoord peer",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the client key is not authorised",
}


class Monitor:
    """Calls `on_event(event, value)` for the `WATCHED` events of `socket`. Create it before bind or connect."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        socket: "zmq.Socket[bytes]",
        on_event: Callable[[int, int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched_socket = socket
        self._on_event = on_event
        self._closed = False
        address = f"inproc://monitor/{id(socket)}"
        socket.monitor(address, WATCHED)
        self._socket = context.socket(zmq.PAIR)
        # ZeroMQ's I/O thread waits for room for an event, and would stop all traffic: let there always be room.
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._descriptor = cast(int, self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Watch no more. Must happen before the watched socket is closed."""
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        # An event that is sent after its receiver was closed would keep the I/O thread waiting for ever.
        self._watched_socket.disable_monitor()
        self._socket.close()

    def _drain(self) -> None:
        while not self._closed:
            try:
                event, _ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(*_EVENT.unpack(event))
