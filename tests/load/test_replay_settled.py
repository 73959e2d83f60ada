"""With every operation ended before the next request, a replay hits exactly what the reference cache hits."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvcoord.load.plan import Agreeing, ReplayOptions, plan_replay
from kvcoord.load.reference import ReferenceCache
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport
from kvcoord.load.trace import Request, read, write
from kvcoord.runtime.exits import Exit

PUBLIC_TRACES = Path(__file__).parents[2] / ".." / "shared" / "traces"


def branching(seed: int, requests: int) -> Iterator[Request]:
    """Short paths that share prefixes at every depth, some longer than a small pool."""
    rng = Random(seed)
    fresh = count()
    paths: list[tuple[int, ...]] = [()]
    for number in range(requests):
        path = rng.choice(paths[-12:])
        path = path[: rng.randint(0, len(path))]
        path += tuple(next(fresh) for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8, 13)))) or path[:0]
        path = path or (next(fresh),)
        paths.append(path)
        yield Request(number, 1, 1, path)


async def settled(trace: Path, requests: int | None = None, **options: Any) -> ReplayReport:
    """Plays it, checks it against the reference, and returns the report."""
    plan = plan_replay(ReplayOptions(**{"trace": str(trace), "requests_max": requests, "settle": True, **options}))
    reference = ReferenceCache(min(plan.device_pages), min(plan.host_pages))
    hits = [reference.request(request.keys) for request in read(trace, requests)]
    report = await replay(plan)
    assert report.exit_code is Exit.OK
    assert report.pages_hit_by_tier == {"device": sum(hit for hit, _ in hits), "host": sum(hit for _, hit in hits)}
    assert min(report.pages_hit_by_tier.values()) > 0
    return report


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1, "device_pages": (24,), "host_pages": (60,)},
        {"ranks": 2, "device_pages": (16, 17), "host_pages": (40, 39)},
        {"ranks": 2, "device_pages": (30,), "host_pages": (14,)},
    ],
    ids=["one rank", "unequal pools", "host smaller than device"],
)
async def test_generated_traces(tmp_path: Path, seed: int, options: dict[str, Any]) -> None:
    trace = tmp_path / "trace.jsonl"
    write(trace, branching(seed, 120))
    await settled(trace, **options)


async def test_pipeline_stages_with_lag_and_a_slow_copy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write(trace, branching(9, 80))
    await settled(trace, tp=2, pp=2, lag=2, device_pages=(24,), host_pages=(60,), slow_copy_s={3: 0.002})


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
async def test_the_beginning_of_a_public_trace(name: str) -> None:
    trace = PUBLIC_TRACES / f"{name}.jsonl"
    if not trace.exists():
        pytest.skip(f"{trace} is absent")
    report = await settled(trace, 400, ranks=2, device_pages=(400,), host_pages=(4000,))
    assert min(report.pages_evicted.values()) > 0


async def test_a_collective_decides_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trace = tmp_path / "trace.jsonl"
    write(trace, branching(5, 60))
    await settled(
        trace, ranks=2, device_pages=(24,), host_pages=(60, 59), agreement=Agreeing.GLOO, slow_copy_s={1: 0.001}
    )
