"""Nobody at an address, and somebody gone without a name: what a transport tells so that nobody has to wait for it."""

import asyncio
from pathlib import Path

import pytest

from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.zeromq import ZeromqTransport
from tests.transport.endpoints import KINDS, LIMITS, Kind, send_until


@pytest.mark.parametrize("name", ["zeromq-ipc", "zeromq-tcp", "node", "loopback"])
async def test_a_connection_is_told_that_nobody_is_there_and_still_finds_who_comes_later(
    name: str, tmp_path: Path, port: int
) -> None:
    kind = KINDS[name](tmp_path, port)
    async with kind.serve() as served:
        address = served.listener.address
    absences: asyncio.Queue[None] = asyncio.Queue()
    arrivals: asyncio.Queue[None] = asyncio.Queue()
    losses: list[str] = []
    connection = await kind.transport.open_connection(
        address,
        b"rank-0",
        on_batch=lambda batch: None,
        on_connected=lambda: arrivals.put_nowait(None),
        on_lost=losses.append,
        limits=LIMITS,
        on_absent=lambda: absences.put_nowait(None),
    )
    await absences.get()
    assert not connection.connected
    async with kind.serve(address=address):
        await arrivals.get()
        assert losses == []
        await connection.close(0)


@pytest.mark.parametrize("linger_s", [0.0, 1.0])
async def test_a_zeromq_listener_is_told_that_somebody_is_gone_and_the_next_send_shows_who(
    linger_s: float, tmp_path: Path
) -> None:
    kind = Kind("zeromq-ipc", ZeromqTransport(), f"ipc://{tmp_path}/z")
    parted: asyncio.Queue[None] = asyncio.Queue()
    messages: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()

    def take(batch: list[tuple[bytes, bytes]]) -> None:
        for item in batch:
            messages.put_nowait(item)

    listener = await kind.transport.open_listener(
        kind.address,
        on_batch=take,
        on_lost=lambda peer, cause: None,
        limits=LinkLimits(),
        on_parted=lambda: parted.put_nowait(None),
    )
    async with (
        kind.connect(kind.address, identity=b"stays") as stays,
        kind.connect(kind.address, identity=b"goes") as goes,
    ):
        for connected in (stays, goes):
            await connected.arrivals.get()
            connected.connection.send(b"hello")
        assert {(await messages.get())[0] for _ in range(2)} == {b"stays", b"goes"}
        assert parted.empty()
        await goes.connection.close(linger_s)
        await parted.get()
        await send_until(lambda: listener.send(b"goes", b"?"), SendResult.UNREACHABLE)
        assert listener.send(b"stays", b"?") is SendResult.SENT
    await listener.close(0)
