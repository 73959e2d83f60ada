"""What every transport promises, on every transport."""

import asyncio
from functools import partial

import pytest

from kvcoord.errors import ConfigError, FrameOversized, PeerUnavailable
from kvcoord.transport.link import LinkLimits, SendResult
from tests.transport.endpoints import LIMITS, Kind, introduce, send_until, send_when_room

SMALL = LinkLimits(queue_messages_max=4, message_bytes_max=64 << 10, queue_bytes_max=256 << 10)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_messages_arrive_in_order_in_both_directions(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        for payload in numbered(200):
            assert connected.connection.send(payload) is SendResult.SENT
            assert served.listener.send(peer, payload) is SendResult.SENT
        assert await served.payloads(200) == numbered(200)
        assert await connected.payloads(200) == numbered(200)


async def test_what_arrived_together_is_handed_over_together(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        for payload in numbered(200):
            connected.connection.send(payload)
            served.listener.send(peer, payload)
        await served.payloads(200)
        await connected.payloads(200)
        assert max(map(len, served.batches)) > 1
        assert max(map(len, connected.batches)) > 1


async def test_a_listener_keeps_its_peers_apart(kind: Kind) -> None:
    async with (
        kind.serve() as served,
        kind.connect(served.listener.address, identity=b"rank-0") as first,
        kind.connect(served.listener.address, identity=b"rank-1") as second,
    ):
        await first.connection.wait_connected()
        await second.connection.wait_connected()
        first_peer = await introduce(served, first)
        second_peer = await introduce(served, second)
        assert first_peer != second_peer
        served.listener.send(second_peer, b"for the second")
        served.listener.send(first_peer, b"for the first")
        assert await first.payloads(1) == [b"for the first"]
        assert await second.payloads(1) == [b"for the second"]
        assert served.listener.statistics().peers_connected == 2


async def test_a_peer_is_known_by_its_identity(lasting_kind: Kind) -> None:
    async with lasting_kind.pair() as (_, _, peer):
        assert peer == b"rank-0"


async def test_replies_sent_from_inside_a_callback_lose_no_wake_up(kind: Kind) -> None:
    async with kind.pair() as (served, connected, _):
        served.reply = lambda peer, payload: check(served.listener.send(peer, payload))
        connected.reply = lambda payload: check(connected.connection.send(payload)) if payload < b"r0900" else None

        def check(result: SendResult) -> None:
            assert result is SendResult.SENT

        for number in range(8):
            connected.connection.send(b"r%04d" % number)
        for number in range(300):
            connected.connection.send(b"s%04d" % number)
            await connected.messages.get()
        assert served.listener.statistics().sends_full == 0


async def test_ten_thousand_messages_each_way_are_neither_lost_nor_reordered(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        count = 10_000

        async def upward() -> None:
            for payload in numbered(count):
                await send_when_room(partial(connected.connection.send, payload))

        async def downward() -> None:
            for payload in numbered(count):
                await send_when_room(partial(served.listener.send, peer, payload))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(upward())
            tasks.create_task(downward())
            received = tasks.create_task(served.payloads(count))
            answered = tasks.create_task(connected.payloads(count))
        assert received.result() == numbered(count)
        assert answered.result() == numbered(count)


async def test_a_full_queue_is_answered_and_everything_taken_still_arrives(kind: Kind) -> None:
    async with kind.pair(SMALL, SMALL) as (served, connected, peer):
        payload = bytes(60_000)
        up = down = 0
        while connected.connection.send(b"%04d" % up + payload) is SendResult.SENT:
            up += 1
        while served.listener.send(peer, b"%04d" % down + payload) is SendResult.SENT:
            down += 1
        assert [message[:4] for message in await served.payloads(up)] == [b"%04d" % number for number in range(up)]
        assert [message[:4] for message in await connected.payloads(down)] == [b"%04d" % n for n in range(down)]
        assert connected.connection.statistics().sends_full == 1
        assert served.listener.statistics().sends_full == 1
        await send_when_room(partial(connected.connection.send, b"room again"))
        assert await served.payloads(1) == [b"room again"]
        assert served.messages.empty()


async def test_a_peer_that_was_never_there_is_unreachable(kind: Kind) -> None:
    async with kind.serve() as served:
        assert served.listener.send(b"nobody", b"x") is SendResult.UNREACHABLE
        assert served.listener.statistics().sends_unreachable == 1


async def test_a_listener_that_is_not_there_is_unreachable_and_closing_ends(kind: Kind) -> None:
    limits = LinkLimits(connect_timeout_s=0.02)
    async with kind.serve() as served:
        address = served.listener.address
    if not kind.reconnects:
        with pytest.raises(PeerUnavailable, match=address):
            async with kind.connect(address, limits):
                pass
        return
    async with kind.connect(address, limits) as connected:
        for _ in range(5):
            assert connected.connection.send(b"vote") is SendResult.UNREACHABLE
        with pytest.raises(PeerUnavailable, match="connect_timeout_s"):
            await connected.connection.wait_connected()
        assert not connected.connection.connected
        await connected.connection.close(linger_s=0.1)
        assert connected.connection.statistics().sends_unreachable == 5


async def test_messages_of_any_size_up_to_the_limit_arrive_whole(kind: Kind) -> None:
    payloads = [b"", b"x", bytes(range(256)) * 256, b"y" * LIMITS.message_bytes_max, b""]
    async with kind.pair() as (served, connected, peer):
        for payload in payloads:
            assert connected.connection.send(payload) is SendResult.SENT
            assert served.listener.send(peer, payload) is SendResult.SENT
        assert await served.payloads(len(payloads)) == payloads
        assert await connected.payloads(len(payloads)) == payloads


async def test_a_message_beyond_the_own_limit_is_not_sent(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        too_long = bytes(LIMITS.message_bytes_max + 1)
        with pytest.raises(FrameOversized):
            connected.connection.send(too_long)
        with pytest.raises(FrameOversized):
            served.listener.send(peer, too_long)
        connected.connection.send(b"next")
        assert await served.payloads(1) == [b"next"]


async def test_a_message_beyond_the_receivers_limit_is_dropped_and_counted(kind: Kind) -> None:
    strict = LinkLimits(message_bytes_max=1000)
    async with kind.pair(strict) as (served, connected, _):
        connected.connection.send(bytes(1001))
        if kind.keeps_oversized_peers:
            connected.connection.send(b"next")
            assert await served.payloads(1) == [b"next"]
        else:
            await connected.losses.get()
        assert served.listener.statistics().messages_oversized == 1
        assert served.messages.empty()


async def test_a_connection_that_closes_delivers_what_it_has_queued(kind: Kind) -> None:
    async with kind.pair(connection_limits=LinkLimits(linger_s=10)) as (served, connected, _):
        payloads = [bytes(100_000)] * 30 + [b"leaving"]
        for payload in payloads:
            assert connected.connection.send(payload) is SendResult.SENT
        await connected.connection.close()
        assert connected.connection.send(b"too late") is SendResult.UNREACHABLE
        assert await served.payloads(len(payloads)) == payloads


async def test_a_listener_that_closes_delivers_what_it_has_queued(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        payloads = [bytes(100_000)] * 30 + [b"leaving"]
        for payload in payloads:
            assert served.listener.send(peer, payload) is SendResult.SENT
        await served.listener.close(linger_s=10)
        assert served.listener.send(peer, b"too late") is SendResult.UNREACHABLE
        await connected.losses.get()
        assert connected.messages.qsize() == len(payloads)
        assert await connected.payloads(len(payloads)) == payloads


async def test_a_loss_is_told_after_everything_that_was_sent_before_it(kind: Kind) -> None:
    async with kind.pair(connection_limits=LinkLimits(batch_messages_max=4)) as (served, connected, peer):
        for payload in numbered(100):
            served.listener.send(peer, payload)
        await served.listener.close(linger_s=10)
        await connected.losses.get()
        assert connected.messages.qsize() == 100


async def test_a_connection_hears_that_its_listener_is_gone(kind: Kind) -> None:
    async with kind.pair() as (served, connected, _):
        await served.listener.close()
        assert await connected.losses.get()
        assert not connected.connection.connected
        assert connected.connection.send(b"x") is SendResult.UNREACHABLE
        assert connected.connection.statistics().peers_lost == 1


async def test_a_peer_that_left_is_unreachable_and_lost_after_its_last_message(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        connected.connection.send(b"last")
        await connected.connection.close()
        assert await served.payloads(1) == [b"last"]
        await send_until(partial(served.listener.send, peer, b"x"), SendResult.UNREACHABLE)
        assert served.listener.send(peer, b"x") is SendResult.UNREACHABLE
        if kind.names_lost_peers:
            assert (await served.losses.get())[0] == peer


async def test_a_peer_that_comes_back_under_its_identity_is_served(kind: Kind) -> None:
    async with kind.serve() as served:
        for life in range(3):
            async with kind.connect(served.listener.address, identity=b"rank-0") as connected:
                await connected.connection.wait_connected()
                peer = await introduce(served, connected)
                served.listener.send(peer, b"welcome %d" % life)
                assert await connected.payloads(1) == [b"welcome %d" % life]


async def test_a_connection_finds_the_next_listener_at_its_address(lasting_kind: Kind) -> None:
    kind = lasting_kind
    async with kind.serve() as served, kind.connect(served.listener.address) as connected:
        await connected.arrivals.get()
        await served.listener.close()
        await connected.losses.get()
        async with kind.serve(address=served.listener.address) as successor:
            await connected.arrivals.get()
            peer = await introduce(successor, connected)
            successor.listener.send(peer, b"again")
            assert await connected.payloads(1) == [b"again"]


async def test_no_callback_runs_after_close(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        served.listener.send(peer, b"unheard")
        await connected.connection.close()
        assert connected.messages.empty()
        assert connected.losses.empty()
    async with kind.pair() as (served, connected, _):
        connected.connection.send(b"unheard")
        await served.listener.close()
        assert served.messages.empty()
        assert served.losses.empty()


async def test_closing_twice_is_harmless_and_waiting_on_a_closed_connection_fails(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        for _ in range(2):
            await connected.connection.close()
            await served.listener.close()
        with pytest.raises(PeerUnavailable):
            await connected.connection.wait_connected()
        assert served.listener.send(peer, b"x") is SendResult.UNREACHABLE


async def test_statistics_count_messages_and_bytes(kind: Kind) -> None:
    async with kind.pair() as (served, connected, peer):
        served.listener.send(peer, b"12345")
        await connected.payloads(1)
        up, down = connected.connection.statistics(), served.listener.statistics()
        assert (up.messages_sent, up.bytes_sent, up.messages_received, up.bytes_received) == (1, 5, 1, 5)
        assert (down.messages_sent, down.bytes_sent, down.messages_received, down.bytes_received) == (1, 5, 1, 5)
        assert up.peers_connected == down.peers_connected == 1


async def test_an_address_in_use_is_refused_with_the_fix(kind: Kind) -> None:
    async with kind.pair() as (served, connected, _):
        with pytest.raises(ConfigError, match="already in use") as caught:
            async with kind.serve(address=served.listener.address):
                pass
        assert caught.value.value == served.listener.address
        connected.connection.send(b"still served")
        assert await served.payloads(1) == [b"still served"]


async def test_an_address_of_another_scheme_is_refused(kind: Kind) -> None:
    with pytest.raises(ConfigError, match="write"):
        async with kind.serve(address="http://127.0.0.1:1"):
            pass
    with pytest.raises(ConfigError, match="write"):
        async with kind.connect("http://127.0.0.1:1"):
            pass
