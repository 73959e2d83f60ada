"""All transport tests run on asyncio's own event loop and on uvloop's: their sockets differ in small ways."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.ports import reserved_port
from tests.transport.endpoints import KINDS, Kind


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Kind:
    """One transport with an address for it."""
    return KINDS[request.param](tmp_path, port)


@pytest.fixture(params=sorted(KINDS.keys() - {"unix"}))
def lasting_kind(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Kind:
    """A transport whose connections have an identity and outlive their listener: all but Unix."""
    return KINDS[request.param](tmp_path, port)
