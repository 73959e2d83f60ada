"""The HTTP port with real sockets, on both event loops."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcoord.errors import ConfigError
from kvcoord.observability.http import HttpServer
from kvcoord.observability.http_connection import HttpLimits
from kvcoord.observability.http_routes import Response, Route, process_routes
from kvcoord.observability.metrics import CoordinatorMetrics
from kvcoord.observability.snapshot import CoordinatorSnapshot, GroupSnapshot
from tests.ports import reserved_port

SNAPSHOT = CoordinatorSnapshot(
    version="0.1.0",
    incarnation="c0ffee",
    uptime_s=1.0,
    ready=False,
    ready_reason="rank 1 of a is absent",
    groups=[GroupSnapshot(name="a", state="joining", world_size=2)],
)


def routes(not_ready: str = "") -> dict[str, Route]:
    return process_routes(
        not_ready=lambda: not_ready,
        metrics=CoordinatorMetrics(lambda: SNAPSHOT).render,
        status=lambda: SNAPSHOT,
        config=lambda: "bind: []\n",
        events=lambda: b'{"format":1}\n',
    )


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@asynccontextmanager
async def serving(served: dict[str, Route], limits: HttpLimits | None = None) -> AsyncIterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, served, limits)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def exchange(server: HttpServer, request: bytes) -> bytes:
    """Everything the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close this side first; returns when the server has closed its own."""
    writer.write_eof()
    await reader.read()
    writer.close()
    await writer.wait_closed()


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    """One request with the standard library's client. Blocks: call it in a thread."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


async def test_every_route_answers_an_ordinary_client() -> None:
    async with serving(routes()) as server:
        assert await asyncio.to_thread(get, server, "/healthz") == (200, "text/plain; charset=utf-8", b"ok\n")
        assert (await asyncio.to_thread(get, server, "/readyz"))[0] == 200
        assert (await asyncio.to_thread(get, server, "/config"))[2] == b"bind: []\n"
        status, content_type, body = await asyncio.to_thread(get, server, "/status")
        assert (status, content_type) == (200, "application/json")
        assert json.loads(body)["groups"][0]["name"] == "a"
        assert json.loads(body)["process"] == "coordinator"
        assert (await asyncio.to_thread(get, server, "/status", "HEAD"))[2] == b""
        assert (await asyncio.to_thread(get, server, "/status", "DELETE"))[0] == 405
        status, _, body = await asyncio.to_thread(get, server, "/nowhere")
        assert (status, body) == (404, b"no such route; there are: /config /events /healthz /metrics /readyz /status\n")


async def test_metrics_read_as_prometheus_reads_them() -> None:
    async with serving(routes()) as server:
        status, content_type, body = await asyncio.to_thread(get, server, "/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families["kvcoord_coordinator_world_size"].samples[0].labels == {"group": "a"}
    assert all(name.startswith("kvcoord_") for name in families)


async def test_alive_and_ready_are_two_things() -> None:
    async with serving(routes(not_ready="rank 1 of a is absent")) as server:
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200
        status, _, body = await asyncio.to_thread(get, server, "/readyz")
    assert (status, body) == (503, b"not ready: rank 1 of a is absent\n")


async def test_garbage_from_one_peer_does_not_disturb_another() -> None:
    async with serving(routes()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /heal")
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50 + b"\n\n",
            b"\r\n" * 20000,
            b"\xff" * 70000,
        ):
            assert (await exchange(server, garbage)).startswith(b"HTTP/1.1 4")
        writer.write(b"thz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"ok\n")
        writer.close()
        await writer.wait_closed()


async def test_a_peer_that_goes_away_mid_request_leaves_nothing() -> None:
    async with serving(routes()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /healthz HT")
        await hang_up(reader, writer)
        assert server.connections == 0


async def test_an_unfinished_request_is_ended_by_its_deadline() -> None:
    async with serving(routes(), HttpLimits(request_timeout_s=0.01)) as server:
        assert (await exchange(server, b"GET /healthz HTTP/1.1\r\nHos")).startswith(b"HTTP/1.1 408 ")


async def test_a_silent_peer_is_closed() -> None:
    async with serving(routes(), HttpLimits(idle_timeout_s=0.01)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b""
        writer.close()


async def test_pipelined_large_answers_to_a_slow_reader_all_arrive_and_in_order() -> None:
    bodies = iter([bytes([letter]) * 300_000 for letter in b"abcdefgh"])
    request = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"
    last = request.replace(b"Host", b"Connection: close\r\nHost")
    async with serving({"/large": lambda: Response(next(bodies))}) as server:
        answer = await exchange(server, request * 7 + last)
    received = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 ")[1:]]
    assert received == [bytes([letter]) * 300_000 for letter in b"abcdefgh"]


async def test_connections_beyond_the_limit_are_refused_and_one_that_closes_makes_room() -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    async with serving(routes(), HttpLimits(connections_max=3)) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for reader, writer in held:
            writer.write(request)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _ in range(20):
            assert (await exchange(server, b"")).startswith(b"HTTP/1.1 503 ")
        assert server.connections == 3
        for reader, writer in held:
            await hang_up(reader, writer)
        assert (await asyncio.to_thread(get, server, "/healthz"))[0] == 200


async def test_closing_ends_open_connections_leaves_no_task_and_frees_the_port(port: int) -> None:
    before = asyncio.all_tasks()
    server = HttpServer("127.0.0.1", port, routes())
    await server.open()
    peers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
    for reader, writer in peers:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readline()
    await server.close()
    await server.close()
    assert server.connections == 0
    assert asyncio.all_tasks() == before
    for _, writer in peers:
        writer.close()
    again = HttpServer("127.0.0.1", port, routes())
    await again.open()
    await again.close()


async def test_a_taken_port_is_a_configuration_error_that_names_address_and_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http='127\.0\.0\.1:{port}': another process .* give another port"):
            await HttpServer("127.0.0.1", port, routes()).open()


@pytest.mark.parametrize(
    ("host", "port", "fix"),
    [("192.0.2.1", 0, "no such address"), ("127.0.0.1", 70000, "at most 65535"), ("a" * 70, 0, "cannot listen")],
)
async def test_an_impossible_address_is_a_configuration_error(host: str, port: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        await HttpServer(host, port, routes()).open()


def test_importing_the_folder_loads_nothing_heavy() -> None:
    program = (
        "import sys, kvcoord.observability.http, kvcoord.observability.metrics, kvcoord.observability.logs,"
        " kvcoord.observability.recorder; print(*sorted({'torch', 'numpy', 'zmq', 'aiohttp'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert completed.stdout == "\n"
