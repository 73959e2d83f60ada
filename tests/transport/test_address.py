"""Local addresses: what is refused, and with which advice."""

import socket
from pathlib import Path

import pytest

from kvcoord.errors import ConfigError
from kvcoord.transport.address import SOCKET_PATH_BYTES_MAX, claim_socket_path, parse_socket_path
from kvcoord.transport.link import LinkLimits
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport
from tests.transport.endpoints import Kind


@pytest.fixture(params=["ipc", "unix"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "ipc":
        return Kind("zeromq-ipc", ZeromqTransport(), f"ipc://{tmp_path}/s")
    return Kind("unix", UnixTransport(), f"unix://{tmp_path}/s")


def path_of(kind: Kind) -> Path:
    return Path(kind.address.split("://")[1])


def leave_socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


async def test_a_socket_file_that_nobody_serves_is_replaced(local: Kind) -> None:
    leave_socket_file(path_of(local))
    async with local.serve() as served, local.connect(local.address) as connected:
        await connected.connection.wait_connected()
        connected.connection.send(b"hello")
        assert await served.payloads(1) == [b"hello"]


async def test_a_file_that_is_not_a_socket_is_never_removed(local: Kind) -> None:
    path_of(local).write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        async with local.serve():
            pass
    assert path_of(local).read_text() == "precious"


async def test_a_missing_directory_is_named(local: Kind) -> None:
    missing = path_of(local).parent / "missing"
    with pytest.raises(ConfigError, match=f"directory {missing} does not exist"):
        async with local.serve(address=f"{local.address.split('://')[0]}://{missing}/s"):
            pass


async def test_a_path_too_long_for_a_socket_is_refused_on_both_sides(local: Kind) -> None:
    address = f"{local.address}{'x' * SOCKET_PATH_BYTES_MAX}"
    with pytest.raises(ConfigError, match="at most 107"):
        async with local.serve(address=address):
            pass
    with pytest.raises(ConfigError, match="at most 107"):
        async with local.connect(address):
            pass


def test_the_path_limit_counts_bytes() -> None:
    assert len(parse_socket_path("unix:///" + "x" * 106)) == 107
    for path in ("x" * 107, "é" * 54):
        with pytest.raises(ConfigError, match="at most 107"):
            parse_socket_path("unix:///" + path)


@pytest.mark.parametrize("address", ["", "unix://", "ipc://relative/path", "ipc://@abstract", "ipc:///a\0b", "/bare"])
def test_an_address_that_names_no_absolute_path_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        parse_socket_path(address)


def test_a_free_path_is_claimed_without_touching_it(tmp_path: Path) -> None:
    assert claim_socket_path(f"unix://{tmp_path}/free") == f"{tmp_path}/free"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_messages_max", 0),
        ("message_bytes_max", 0),
        ("batch_messages_max", 0),
        ("peers_max", 0),
        ("connect_timeout_s", 0.0),
        ("send_timeout_s", 0.0),
        ("linger_s", -1.0),
        ("queue_bytes_max", 1 << 20),
        ("reconnect_interval_s", 0.0),
        ("reconnect_interval_max_s", 0.01),
    ],
)
def test_limits_that_would_wait_for_ever_or_hold_nothing_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        LinkLimits(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
