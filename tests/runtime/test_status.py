"""Asking for the status, wherever somebody listens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvcoord.config import CoordinatorConfig
from kvcoord.errors import ConfigError, DeadlineExceeded, PeerUnavailable
from kvcoord.load.chaos.link import Link, LinkState
from kvcoord.observability.http import HttpServer
from kvcoord.observability.http_routes import JSON, Response
from kvcoord.observability.snapshot import CoordinatorSnapshot, WorkerSnapshot
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import Answers, Done, FromEngine, Landed, Status, StatusBody
from kvcoord.runtime import status
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.runtime.status import ask
from kvcoord.transport.curve import generate_keys
from kvcoord.transport.link import LinkLimits
from kvcoord.transport.unix import UnixTransport
from tests.ports import reserved_port
from tests.runtime.scrape import get

WORKER = WorkerSnapshot(version="9", incarnation="a", uptime_s=1.0, ready=True, group="g", rank=3, state="active")


@asynccontextmanager
async def coordinator(**options: object) -> AsyncIterator[Coordinator]:
    config = msgspec.convert({"http": None} | options, CoordinatorConfig)
    async with Coordinator(config) as opened:
        yield opened


@asynccontextmanager
async def worker(address: str, body: bytes) -> AsyncIterator[None]:
    """A worker that says other things too, and then its status."""
    decoder: Decoder[FromEngine] = Decoder(FromEngine)

    def answer(batch: list[tuple[bytes, bytes]]) -> None:
        for peer, payload in batch:
            [(number, call)] = decoder.decode(payload).calls
            assert isinstance(call, Status)
            listener.send(peer, encode(Landed("load-back/1", 1)))
            listener.send(peer, encode(Answers([(number + 1, Done()), (number, StatusBody(body))])))

    listener = await UnixTransport().open_listener(
        address, on_batch=answer, on_lost=lambda peer, cause: None, limits=LinkLimits()
    )
    try:
        yield
    finally:
        await listener.close(0)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(start: Callable[[Serve], Awaitable[asyncio.Server]], serve: Serve) -> AsyncIterator[asyncio.Server]:
    """A foreign server. Every connection that it has taken is closed at the end."""
    ended: list[asyncio.Event] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        over = ended[-1]
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()
        over.set()

    async with await start(accept) as server:
        yield server
    for over in ended:
        await over.wait()


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
async def test_a_coordinator_answers_on_its_socket(scheme: str, tmp_path: Path) -> None:
    address = f"{scheme}://{tmp_path}/c.sock"
    async with coordinator(bind=[address]) as opened:
        seen = await ask(address, 60.0)
    assert isinstance(seen, CoordinatorSnapshot)
    assert (seen.ready, seen.received) == (True, {"StatusRequest": 1})
    assert seen.incarnation == f"{opened.incarnation:010x}"


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
async def test_a_coordinator_that_stands_still_when_it_is_asked_is_not_taken_for_a_worker(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinator(bind=[f"{scheme}://{tmp_path}/c.sock"]):
        line = Link(tmp_path / "line.sock", tmp_path / "c.sock")
        await line.open()
        line.set(LinkState.FROZEN)
        asked = asyncio.Event()
        ask_worker = status._ask_worker

        async def asking_a_worker(address: str) -> bytes:
            asyncio.get_running_loop().call_soon(asked.set)
            return await ask_worker(address)

        monkeypatch.setattr(status, "_ask_worker", asking_a_worker)
        asking = asyncio.ensure_future(ask(f"{scheme}://{tmp_path}/line.sock", 60.0))
        await asked.wait()
        line.set(LinkState.OPEN)
        assert isinstance(await asking, CoordinatorSnapshot)
        await line.close()


async def test_a_coordinator_answers_over_tcp_to_holders_of_keys_only(tmp_path: Path) -> None:
    generate_keys(tmp_path / "keys")
    generate_keys(tmp_path / "other")
    async with coordinator(bind=["tcp://127.0.0.1:*"], curve_keys_dir=str(tmp_path / "keys")) as opened:
        [address] = opened.addresses
        assert (await ask(address, 60.0, curve_keys_dir=str(tmp_path / "keys"))).ready
        with pytest.raises(ConfigError, match="keys"):
            await ask(address, 60.0)
        with pytest.raises((PeerUnavailable, DeadlineExceeded)):
            await ask(address, 0.3, curve_keys_dir=str(tmp_path / "other"))


async def test_a_coordinator_answers_over_tcp_without_keys_when_both_allow_it() -> None:
    async with coordinator(bind=["tcp://127.0.0.1:*"], insecure_tcp=True) as opened:
        assert (await ask(opened.addresses[0], 60.0, insecure_tcp=True)).ready


async def test_a_coordinator_answers_over_http(tmp_path: Path) -> None:
    async with coordinator(bind=[f"ipc://{tmp_path}/c.sock"], http="127.0.0.1:0") as opened:
        for address in (opened.http_address, f"http://{opened.http_address}", f"http://{opened.http_address}/"):
            assert isinstance(await ask(address, 60.0), CoordinatorSnapshot)


async def test_the_http_port_shows_health_readiness_metrics_and_configuration(tmp_path: Path) -> None:
    async with coordinator(bind=[f"ipc://{tmp_path}/c.sock"], http="127.0.0.1:0") as opened:
        answers = {path: await get(opened.http_address, path) for path in ("healthz", "readyz", "metrics", "config")}
    assert "200 OK" in answers["healthz"]
    assert "200 OK" in answers["readyz"]
    assert "kvcoord_coordinator_ready 1.0" in answers["metrics"]
    assert f"bind: ['ipc://{tmp_path}/c.sock']" in answers["config"]


async def test_one_coordinator_answers_over_every_transport_at_once(tmp_path: Path) -> None:
    addresses = [f"unix://{tmp_path}/u.sock", f"ipc://{tmp_path}/i.sock", "tcp://127.0.0.1:*"]
    async with coordinator(bind=addresses, insecure_tcp=True) as opened:
        seen = [await ask(address, 60.0, insecure_tcp=True) for address in opened.addresses]
        assert {snapshot.incarnation for snapshot in seen} == {f"{opened.incarnation:010x}"}


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
async def test_a_worker_answers_on_its_socket(scheme: str, tmp_path: Path) -> None:
    address = f"{scheme}://{tmp_path}/rank3.sock"
    async with worker(address, msgspec.json.encode(WORKER)):
        assert await ask(address, 60.0) == WORKER


async def test_a_body_that_is_no_status_says_so(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/rank3.sock"
    async with worker(address, b'{"process": "toaster"}'):
        with pytest.raises(PeerUnavailable, match="no status of this version"):
            await ask(address, 60.0)


async def test_where_nobody_listens_that_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="No such file"):
        await ask(f"ipc://{tmp_path}/nobody.sock", 60.0)
    with reserved_port() as port, pytest.raises(PeerUnavailable, match=f"127.0.0.1:{port}"):
        await ask(f"127.0.0.1:{port}", 60.0)


async def test_who_takes_the_question_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(lambda accept: asyncio.start_unix_server(accept, tmp_path / "mute.sock"), listen):
        with pytest.raises(DeadlineExceeded, match="status from"):
            await ask(f"ipc://{tmp_path}/mute.sock", 0.3)


async def test_who_speaks_another_language_is_told_apart(tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    async with serving(lambda accept: asyncio.start_server(accept, "127.0.0.1", 0), greet) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(PeerUnavailable, match="does not speak HTTP"):
            await ask(f"http://{host}:{port}", 60.0)


async def test_another_http_server_is_told_apart() -> None:
    server = HttpServer("127.0.0.1", 0, {"/status": lambda: Response(b"[]", JSON)})
    await server.open()
    with pytest.raises(PeerUnavailable, match="no status"):
        await ask(server.address, 60.0)
    await server.close()
    server = HttpServer("127.0.0.1", 0, {})
    await server.open()
    with pytest.raises(PeerUnavailable, match="404"):
        await ask(server.address, 60.0)
    await server.close()


@pytest.mark.parametrize("address", ["nonsense", "http://", "ftp://host:21", "http://host:99999", "udp://x", ":80"])
async def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write it as"):
        await ask(address, 60.0)
