"""A coordinator that is not where a rank looks for it: the log says so once, and what to look at."""

import asyncio
import logging
from pathlib import Path

import pytest

from kvcoord.config.process import WorkerConfig
from kvcoord.runtime.uplink import Uplink
from kvcoord.transport.link import LinkLimits
from kvcoord.transport.node import NodeTransport


async def test_an_address_where_nobody_answers_is_logged_once_with_what_to_look_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    absent: asyncio.Queue[None] = asyncio.Queue()
    config = WorkerConfig(rank=0, coordinators=[f"unix://{tmp_path}/a.sock", f"unix://{tmp_path}/b.sock"])
    up = Uplink(
        config,
        NodeTransport(),
        LinkLimits(connect_timeout_s=0.001),
        lambda _: None,
        on_lost=lambda: None,
        on_absent=lambda: absent.put_nowait(None),
    )
    after = 0
    while len(caplog.records) < 2 or (after := after + 1) < 4:
        for index in (0, 1):
            up.attach(index, 1)
            await absent.get()
    await up.close()
    told = sorted(record.getMessage() for record in caplog.records)
    assert [said.partition(";")[0] for said in told] == [
        f"no coordinator answers at {address}" for address in config.coordinators
    ]
    assert "ipc:// is not found at unix://" in told[0]
