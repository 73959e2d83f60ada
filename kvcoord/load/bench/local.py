"""`kvcoord bench local`: one call from an engine to its sidecar and back, against a raw Unix-socket ping-pong."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from kvcoord.client import BlockingCacheClient, connect_blocking
from kvcoord.config.process import LogLevel, WorkerConfig
from kvcoord.load.bench.agreement import Effort
from kvcoord.load.bench.bed import write_config
from kvcoord.load.bench.result import Budget, Chart, LatencyRow, Result, Series, compare, distribution
from kvcoord.load.bench.star import StarMember
from kvcoord.load.bench.subjects import group_config
from kvcoord.runtime.children import KVCOORD, SERVE, Children

PATH_PAGES: Final = (1, 188)
"""A short path, and one of 12,032 tokens in pages of 64."""

BUDGET: Final = Budget(ratio_p50_max=3.0)


async def local(effort: Effort) -> Result:
    """A worker of a group of one, and a ping-pong process, asked in turn."""
    with tempfile.TemporaryDirectory(prefix="kvcoord-") as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children:
            hub = await children.start("ping-pong", ["-m", "kvcoord.load.bench.star", str(folder / "star"), "1"])
            config = WorkerConfig(
                group=group_config("bench-local", 1, 1),
                rank=0,
                listen=f"ipc://{folder}/rank0.sock",
                coordinators=[f"unix://{folder}/coordinator.sock"],
                embed_coordinator=True,
                http=None,
                log_level=LogLevel.ERROR,
            )
            path = write_config(folder, "rank0", config)
            worker = await children.start("worker", [*KVCOORD, "worker", "--config", path, *SERVE])
            await hub.hear()
            await worker.ready()
            rows, charts = await asyncio.to_thread(_measure, folder, effort)
    return Result(name="local", title="One call from an engine to its sidecar", rows=rows, charts=charts)


def _measure(folder: Path, effort: Effort) -> tuple[list[LatencyRow], list[Chart]]:
    star = StarMember(str(folder / "star"))
    rows, charts = [], []
    with connect_blocking(f"ipc://{folder}/rank0.sock") as client:
        client.register()
        for pages in PATH_PAGES:
            case = f"match of {pages} pages" if pages > 1 else "match of a page"
            calls, pings = _alternate(client, star, pages, effort)
            rows.append(compare(case, 1, calls, pings, BUDGET if pages == 1 else None))
            charts.append(
                Chart(
                    title=f"{case}: engine to sidecar and back",
                    x_label="microseconds",
                    y_label="share of all",
                    lines=[distribution(calls), distribution(pings)],
                    x_log=True,
                )
            )
    star.close()
    return rows, charts


def _alternate(client: BlockingCacheClient, star: StarMember, pages: int, effort: Effort) -> tuple[Series, Series]:
    keys = [number.to_bytes(16, "big") for number in range(1, pages + 1)]
    calls: list[float] = []
    pings: list[float] = []
    clock = time.perf_counter_ns
    for _ in range(effort.blocks * 5):
        for _ in range(effort.acts):
            begun = clock()
            client.match(keys)
            calls.append((clock() - begun) / 1000)
        for _ in range(effort.acts):
            begun = clock()
            star.smallest(1)
            pings.append((clock() - begun) / 1000)
    return Series("blocking client", calls), Series("raw Unix ping-pong", pings)
