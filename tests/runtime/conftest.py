"""The asynchronous tests of this folder run on both event loops that a kvcoord process may have.

Tests of whole processes run once: what is tested has a loop of its own.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import pytest
import uvloop

OF_PROCESSES: Final = ("test_children", "test_failures")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name.startswith(OF_PROCESSES):
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
