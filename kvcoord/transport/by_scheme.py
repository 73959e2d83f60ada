"""Links between ranks and coordinators by their address: `unix://` on one node, ZeroMQ for `ipc://` and `tcp://`."""

from contextlib import AbstractContextManager

from kvcoord.transport.link import (
    Absent,
    Connected,
    Connection,
    ConnectionBatch,
    LinkLimits,
    Listener,
    ListenerBatch,
    Lost,
    Parted,
    PeerLost,
    Transport,
)
from kvcoord.transport.node import SCHEME, NodeTransport
from kvcoord.transport.zeromq import ZeromqTransport


class SchemeTransport:
    """A `link.Transport` for both. `guard`: see `node.NodeTransport`; ZeroMQ's callbacks run without it."""

    def __init__(self, zeromq: ZeromqTransport, guard: AbstractContextManager[object] | None = None) -> None:
        self._zeromq = zeromq
        self._node = NodeTransport(guard)

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> Listener:
        """As `link.Transport.open_listener`."""
        transport = self._of(address)
        return await transport.open_listener(
            address, on_batch=on_batch, on_lost=on_lost, limits=limits, on_parted=on_parted
        )

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
    ) -> Connection:
        """As `link.Transport.open_connection`."""
        return await self._of(address).open_connection(
            address,
            identity,
            on_batch=on_batch,
            on_connected=on_connected,
            on_lost=on_lost,
            limits=limits,
            on_absent=on_absent,
        )

    def _of(self, address: str) -> Transport:
        return self._node if address.startswith(SCHEME) else self._zeromq
