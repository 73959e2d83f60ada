"""What is particular to ZeroMQ: keys, options, foreign peers."""

import os
import select
from pathlib import Path

import pytest
import zmq

from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.transport.curve import CurveClientKeys, generate_keys, load_client_keys, load_server_keys
from kvcoord.transport.endpoint import ZeromqEndpoint
from kvcoord.transport.link import LinkLimits, SendResult
from kvcoord.transport.zeromq import ZeromqConnection, ZeromqTransport
from tests.transport.endpoints import Connected, Kind, introduce

TCP = "tcp://127.0.0.1:*"
QUICK = LinkLimits(connect_timeout_s=0.3)


@pytest.fixture
def ipc(tmp_path: Path) -> Kind:
    return Kind("zeromq-ipc", ZeromqTransport(), f"ipc://{tmp_path}/z")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


def curve(client_keys: CurveClientKeys | None, server_folder: Path) -> Kind:
    transport = ZeromqTransport(
        server_keys=load_server_keys(server_folder), client_keys=client_keys, insecure_tcp=client_keys is None
    )
    return Kind("zeromq-curve", transport, TCP)


async def refused(connected: Connected, expected: str) -> None:
    """Return when waiting in vain has told this cause. The handshakes before may have been too slow to show it."""
    cause = ""
    while expected not in cause:
        with pytest.raises(PeerUnavailable) as raised:
            await connected.connection.wait_connected()
        cause = raised.value.cause


async def test_tcp_without_keys_is_refused_unless_allowed(keys: Path) -> None:
    without = Kind("zeromq-tcp", ZeromqTransport(), TCP)
    with pytest.raises(ConfigError, match="TCP needs keys"):
        async with without.serve():
            pass
    with pytest.raises(ConfigError, match="TCP needs keys"):
        async with without.connect("tcp://127.0.0.1:1"):
            pass
    only_client = Kind("zeromq-tcp", ZeromqTransport(client_keys=load_client_keys(keys)), TCP)
    with pytest.raises(ConfigError, match="TCP needs keys"):
        async with only_client.serve():
            pass


async def test_a_client_whose_key_is_not_authorised_never_gets_in(keys: Path, tmp_path: Path) -> None:
    generate_keys(tmp_path / "stranger")
    stranger = load_client_keys(tmp_path / "stranger")
    wrong = CurveClientKeys(public=stranger.public, secret=stranger.secret, server_public=load_server_keys(keys).public)
    kind = curve(wrong, keys)
    async with kind.serve() as served, kind.connect(served.listener.address, QUICK) as connected:
        await refused(connected, "the client key is not authorised")
        assert connected.connection.send(b"vote") is SendResult.UNREACHABLE
        assert served.messages.empty()
        assert served.listener.statistics().peers_refused > 0


async def test_a_client_without_keys_never_gets_in(keys: Path) -> None:
    kind = curve(None, keys)
    async with kind.serve() as served, kind.connect(served.listener.address, QUICK) as connected:
        await refused(connected, "handshake")
        assert served.messages.empty()


async def test_a_server_with_another_key_is_not_trusted(keys: Path, tmp_path: Path) -> None:
    generate_keys(tmp_path / "impostor")
    kind = curve(load_client_keys(keys), tmp_path / "impostor")
    async with kind.serve() as served, kind.connect(served.listener.address, QUICK) as connected:
        with pytest.raises(PeerUnavailable):
            await connected.connection.wait_connected()
        assert served.messages.empty()


def test_keys_are_written_once_and_secrets_only_for_their_owner(keys: Path) -> None:
    for name in ("server.secret", "client.secret"):
        assert (keys / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists"):
        generate_keys(keys)
    assert load_server_keys(keys).authorised_clients == (load_client_keys(keys).public,)
    assert load_client_keys(keys).server_public == load_server_keys(keys).public


def test_secrets_never_show_in_a_representation(keys: Path) -> None:
    for loaded in (load_server_keys(keys), load_client_keys(keys)):
        assert loaded.secret.decode() not in repr(loaded)
        assert loaded.public.decode() in repr(loaded)


def test_a_secret_that_others_may_read_is_refused(keys: Path) -> None:
    os.chmod(keys / "server.secret", 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_server_keys(keys)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40])
def test_a_malformed_key_file_is_refused_by_name(keys: Path, content: bytes) -> None:
    (keys / "client.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"client\.public"):
        load_client_keys(keys)


def test_a_missing_key_file_is_refused_by_name(keys: Path) -> None:
    (keys / "authorised_clients").unlink()
    with pytest.raises(ConfigError, match="authorised_clients"):
        load_server_keys(keys)


async def test_every_bound_is_set_on_the_sockets(ipc: Kind) -> None:
    limits = LinkLimits(
        queue_messages_max=7,
        message_bytes_max=1000,
        connect_timeout_s=1.5,
        linger_s=0.25,
        reconnect_interval_s=0.01,
        reconnect_interval_max_s=0.2,
    )
    async with ipc.serve(limits) as served, ipc.connect(ipc.address, limits) as connected:
        for endpoint in (served.listener, connected.connection):
            assert isinstance(endpoint, ZeromqEndpoint)
            expected = {
                zmq.SNDHWM: 7,
                zmq.RCVHWM: 7,
                zmq.MAXMSGSIZE: 4000,
                zmq.LINGER: 250,
                zmq.CONNECT_TIMEOUT: 1500,
                zmq.HANDSHAKE_IVL: 1500,
                zmq.RECONNECT_IVL: 10,
                zmq.RECONNECT_IVL_MAX: 200,
                zmq.TCP_KEEPALIVE: 1,
                zmq.IPV6: 0,
            }
            assert {option: endpoint._socket.get(option) for option in expected} == expected


async def test_one_wake_up_hands_over_at_most_the_batch_limit(ipc: Kind) -> None:
    limits = LinkLimits(batch_messages_max=8)
    async with ipc.pair(limits, limits) as (served, connected, _):
        for number in range(100):
            connected.connection.send(b"%d" % number)
        assert await served.payloads(100) == [b"%d" % number for number in range(100)]
        assert max(map(len, served.batches)) <= 8


async def test_a_message_far_beyond_the_limit_breaks_the_connection_and_the_peer_comes_back(ipc: Kind) -> None:
    strict = LinkLimits(message_bytes_max=1000)
    async with ipc.pair(strict) as (served, connected, _):
        connected.connection.send(bytes(4001))
        await connected.losses.get()
        await connected.arrivals.get()
        connected.connection.send(b"back")
        assert await served.payloads(1) == [b"back"]


async def test_a_message_of_several_frames_is_dropped_and_counted(ipc: Kind) -> None:
    async with ipc.serve() as served:
        with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
            foreign.set(zmq.LINGER, 0)
            foreign.connect(served.listener.address)
            foreign.send_multipart([b"", b"request", b"style"])
            foreign.send(b"plain")
            assert await served.payloads(1) == [b"plain"]
        assert served.listener.statistics().messages_malformed == 1


async def test_what_a_killed_listener_had_sent_is_handed_over_before_its_loss(ipc: Kind) -> None:
    with zmq.Context() as context:
        foreign = context.socket(zmq.ROUTER)
        foreign.bind(ipc.address)
        async with ipc.connect(ipc.address, LinkLimits(batch_messages_max=4)) as connected:
            await connected.arrivals.get()
            connected.connection.send(b"hello")
            peer, _ = foreign.recv_multipart()
            for number in range(100):
                foreign.send_multipart([peer, b"%d" % number])
            foreign.close(linger=10_000)
            # The event loop stands still until both the messages and the loss wait for it.
            assert isinstance(connected.connection, ZeromqConnection)
            assert select.select([connected.connection._monitor._descriptor], [], [], 30)[0]
            await connected.losses.get()
            assert connected.messages.qsize() == 100


async def test_a_second_connection_with_the_same_identity_takes_over(ipc: Kind) -> None:
    async with ipc.serve() as served, ipc.connect(ipc.address, identity=b"rank-0") as old:
        await old.connection.wait_connected()
        await introduce(served, old)
        async with ipc.connect(ipc.address, identity=b"rank-0") as new:
            await new.connection.wait_connected()
            peer = await introduce(served, new)
            served.listener.send(peer, b"for the new one")
            assert await new.payloads(1) == [b"for the new one"]
            assert old.messages.empty()


@pytest.mark.parametrize("identity", [b"", b"\0rank", b"x" * 256])
async def test_an_identity_that_cannot_name_a_peer_is_refused(ipc: Kind, identity: bytes) -> None:
    with pytest.raises(UsageError, match="identity"):
        async with ipc.connect(ipc.address, identity=identity):
            pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:notaport", "tcp://203.0.113.7:*"])
async def test_a_tcp_address_that_cannot_be_bound_is_refused_by_name(address: str) -> None:
    kind = Kind("zeromq-tcp", ZeromqTransport(insecure_tcp=True), TCP)
    with pytest.raises(ConfigError) as caught:
        async with kind.serve(address=address):
            pass
    assert caught.value.value == address


async def test_an_address_that_cannot_be_connected_to_is_refused_by_name() -> None:
    kind = Kind("zeromq-tcp", ZeromqTransport(insecure_tcp=True), TCP)
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        async with kind.connect("tcp://127.0.0.1"):
            pass


async def test_a_closed_listener_leaves_no_socket_file(ipc: Kind) -> None:
    path = ipc.address.removeprefix("ipc://")
    async with ipc.serve():
        assert os.access(path, os.F_OK)
    assert not os.access(path, os.F_OK)
