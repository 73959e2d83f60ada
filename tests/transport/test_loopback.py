"""What is particular to the loopback: it is deterministic and forgets what was queued on demand."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.loopback import LoopbackTransport
from tests.transport.endpoints import LIMITS, Kind


@pytest.fixture
def kind() -> Kind:
    return Kind("loopback", LoopbackTransport(), "loopback://coordinator")


async def transcript() -> list[str]:
    """Three ranks that talk over each other through one listener."""
    network, log = LoopbackTransport(), []
    done = asyncio.Event()

    def on_batch(batch: list[tuple[bytes, bytes]]) -> None:
        log.append(f"listener {batch}")
        for peer, payload in batch:
            listener.send(peer, b"re:" + payload)

    def answered(rank: int) -> Callable[[list[bytes]], None]:
        def take(batch: list[bytes]) -> None:
            log.append(f"rank {rank} {batch}")
            if rank == 2:
                done.set()

        return take

    limits = LinkLimits(batch_messages_max=2)
    listener = await network.open_listener("loopback://c", on_batch=on_batch, on_lost=print, limits=limits)
    ranks = [
        await network.open_connection(
            "loopback://c",
            b"rank-%d" % rank,
            on_batch=answered(rank),
            on_connected=lambda: None,
            on_lost=print,
            limits=limits,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        await rank.wait_connected()
    for number in range(2):
        for rank in ranks:
            rank.send(b"%d" % number)
    await done.wait()
    return log


async def test_the_same_program_gives_the_same_transcript() -> None:
    first, second = await transcript(), await transcript()
    assert first == second
    assert first[0] == "listener [(b'rank-0', b'0'), (b'rank-1', b'0')]"


async def test_a_batch_never_exceeds_its_limit(kind: Kind) -> None:
    limits = LinkLimits(batch_messages_max=3)
    async with kind.pair(limits, limits) as (served, connected, _):
        for number in range(10):
            connected.connection.send(b"%d" % number)
        await served.payloads(10)
        assert [len(batch) for batch in served.batches] == [1, 3, 3, 3, 1]


async def test_closing_without_linger_drops_what_was_queued(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        connected.connection.send(b"dropped")
        await connected.connection.close(linger_s=0)
        await served.losses.get()
        assert served.messages.empty()
        assert served.listener.send(peer, b"x") is SendResult.UNREACHABLE
    async with kind.pair() as (served, connected, peer):
        served.listener.send(peer, b"dropped")
        await served.listener.close(linger_s=0)
        await connected.losses.get()
        assert connected.messages.empty()


async def test_the_queue_of_one_peer_never_fills_that_of_another(kind: Kind) -> None:
    limits = LinkLimits(queue_messages_max=2)
    async with (
        kind.serve(limits) as served,
        kind.connect(kind.address, limits, b"rank-0") as busy,
        kind.connect(kind.address, limits, b"rank-1") as quiet,
    ):
        await busy.arrivals.get()
        await quiet.arrivals.get()
        results = [busy.connection.send(b"x") for _ in range(3)]
        assert results == [SendResult.SENT, SendResult.SENT, SendResult.FULL]
        assert quiet.connection.send(b"y") is SendResult.SENT
        assert await served.payloads(3) == [b"x", b"x", b"y"]


async def test_a_connection_that_takes_over_an_identity_ends_the_other(kind: Kind) -> None:
    async with kind.serve() as served, kind.connect(kind.address) as old:
        await old.arrivals.get()
        async with kind.connect(kind.address) as new:
            await new.arrivals.get()
            assert "took over" in await old.losses.get()
            assert "took over" in (await served.losses.get())[1]
            assert old.connection.send(b"x") is SendResult.UNREACHABLE
            served.listener.send(b"rank-0", b"for the new one")
            assert await new.payloads(1) == [b"for the new one"]
            assert served.listener.statistics().peers_connected == 1


async def test_two_networks_never_meet(tmp_path: Path) -> None:
    there = Kind("loopback", LoopbackTransport(), "loopback://c")
    here = Kind("loopback", LoopbackTransport(), "loopback://c")
    async with there.serve(), here.connect("loopback://c", LIMITS) as connected:
        await asyncio.sleep(0)
        assert connected.connection.send(b"x") is SendResult.UNREACHABLE
