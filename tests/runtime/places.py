"""Where a coordinator and its ranks meet in a test: inside the process, over node links, or over ZeroMQ's sockets."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvcoord.config import CoordinatorConfig
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.transport.by_scheme import SchemeTransport
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
from kvcoord.transport.loopback import LoopbackTransport
from kvcoord.transport.zeromq import ZeromqTransport
from tests.runtime.process_group import PATIENT
from tests.runtime.rank_shell import RankShell

SCHEMES = ("loopback", "unix", "zeromq")


class ByPath:
    """The loopback under the addresses that a configuration allows."""

    def __init__(self) -> None:
        self._network = LoopbackTransport()

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> Listener:
        return await self._network.open_listener(_name(address), on_batch=on_batch, on_lost=on_lost, limits=limits)

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
        return await self._network.open_connection(
            _name(address),
            identity,
            on_batch=on_batch,
            on_connected=on_connected,
            on_lost=on_lost,
            limits=limits,
            on_absent=on_absent,
        )


def _name(address: str) -> str:
    return "loopback://" + address.removeprefix("ipc://")


class Place:
    """One transport with two addresses, and everything that was opened there."""

    def __init__(self, scheme: str, folder: Path, stack: AsyncExitStack) -> None:
        self.transport: Transport = ByPath() if scheme == "loopback" else SchemeTransport(ZeromqTransport())
        local = "unix" if scheme == "unix" else "ipc"
        self.address, self.other_address = (f"{local}://{folder}/{name}.sock" for name in ("a", "b"))
        self._stack = stack

    async def coordinator(self, *binds: str, **options: Any) -> Coordinator:
        config = CoordinatorConfig(
            bind=list(binds) or [self.address], **({"http": None, "timeouts": PATIENT} | options)
        )
        return await self._stack.enter_async_context(Coordinator(config, transport=self.transport))

    async def rank(self, rank: int, world_size: int, address: str = "", **options: Any) -> RankShell:
        shell = RankShell(self.transport, [address or self.address], rank, world_size, **options)
        return await self._stack.enter_async_context(shell)

    async def ranks(self, count: int, **options: Any) -> list[RankShell]:
        """A group whose ranks are all active."""
        shells = [await self.rank(rank, count, **options) for rank in range(count)]
        for shell in shells:
            await shell.active()
        return shells
