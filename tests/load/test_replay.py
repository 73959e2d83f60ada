"""Replays with real processes, sockets and bytes: the group stays equal, every page is right, nothing leaks."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcoord.cli.replay import INTERRUPTED, _play
from kvcoord.domain import Reason, WritePolicy
from kvcoord.errors import PeerUnavailable
from kvcoord.load.plan import Agreeing, ReplayOptions, plan_replay
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport
from kvcoord.load.trace import DEMO, read, statistics
from kvcoord.runtime.children import Child, Children
from kvcoord.runtime.exits import Exit
from kvcoord.runtime.process import Stop

REQUESTS = 150
TIGHT = {"device_pages": (260,), "host_pages": (300, 299, 300, 300)}
"""Little more than the longest request of the demo trace; one rank has one host page less."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """After every replay its folder and all of its processes are gone, however it ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[Child] = []
    start = Children.start

    async def recording(self: Children, *args: Any, **kwargs: Any) -> Child:
        started.append(await start(self, *args, **kwargs))
        return started[-1]

    monkeypatch.setattr(Children, "start", recording)
    yield started
    assert list(tmp_path.iterdir()) == []
    assert [child.name for child in started if Path(f"/proc/{child.pid}").exists()] == []


async def played(**options: Any) -> ReplayReport:
    return await replay(plan_replay(ReplayOptions(**{"requests_max": REQUESTS, **options})))


def holds(report: ReplayReport) -> bool:
    """What every replay of ranks that agree must show."""
    assert report.differences == []
    assert report.leaks == []
    assert report.divergence is None
    assert (report.pages_corrupt, report.loads_failed, report.skipped) == (0, 0, 0)
    assert report.requests == REQUESTS
    assert report.exit_code is Exit.OK
    return True


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_pages_are_hit_on_both_tiers_loaded_back_and_evicted_and_all_are_right(ranks: int) -> None:
    report = await played(ranks=ranks)
    assert holds(report)
    assert min(report.pages_hit_by_tier.values()) > 0
    assert min(report.pages_evicted.values()) > 0
    assert report.pages_loaded > 0
    assert report.pages_verified == ranks * report.pages_hit
    assert report.commits == report.covered > REQUESTS


@pytest.mark.parametrize("shape", [{"ranks": 1}, {"ranks": 2}, {"ranks": 4}, {"tp": 2, "pp": 2, "lag": 2}])
async def test_with_pools_that_never_fill_exactly_the_pages_seen_before_are_hit(shape: dict[str, int]) -> None:
    report = await played(unlimited=True, **shape)
    assert holds(report)
    expected = statistics(read(DEMO, REQUESTS))
    assert (report.pages_hit, report.pages_total) == (expected.pages_hit, expected.pages)
    assert report.bytes_moved == report.ranks * expected.pages_distinct * 256 * 4


@pytest.mark.parametrize("shape", [{"ranks": 4}, {"tp": 2, "pp": 2, "lag": 2}], ids=["tp 4", "tp 2 x pp 2"])
async def test_a_smaller_pool_a_slow_copy_and_a_late_engine_delay_the_group_and_never_part_it(
    shape: dict[str, int],
) -> None:
    report = await played(slow_copy_s={2: 0.02}, jitter_s={3: 0.001}, **TIGHT, **shape)
    assert holds(report)
    assert report.retries > 0
    first = report.aborts_first[Reason.DEVICE_FULL]
    assert first.reason is Reason.DEVICE_FULL
    assert first.shortfall["device.kv"] > 0


async def test_a_host_pool_one_page_smaller_aborts_the_write_on_all_ranks_by_name() -> None:
    report = await played(ranks=3, device_pages=(2000,), host_pages=(300, 299, 300), slow_copy_s={2: 0.01})
    assert holds(report)
    first = report.aborts_first[Reason.HOST_FULL]
    assert first.rank in range(3)
    assert first.shortfall["host.kv"] > 0
    assert report.aborts["host_full"] <= report.voted


async def test_a_request_longer_than_the_smallest_pool_is_skipped_by_all_ranks() -> None:
    requests = read(DEMO, REQUESTS)
    longest = max(len(request.hash_ids) for request in requests)
    longer = sum(len(request.hash_ids) >= longest for request in requests)
    report = await played(ranks=2, device_pages=(longest, longest - 1))
    assert report.skipped == longer
    assert report.exit_code is Exit.OK


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE])
async def test_other_write_policies_keep_the_group_equal_too(policy: WritePolicy) -> None:
    report = await played(ranks=2, policy=policy, device_pages=(300,), slow_copy_s={1: 0.001})
    assert holds(report)
    assert report.bytes_moved > 0


async def test_without_agreement_the_same_run_parts_and_the_first_difference_is_named() -> None:
    report = await played(ranks=4, agreement=Agreeing.NONE, slow_copy_s={2: 0.02}, jitter_s={3: 0.001}, **TIGHT)
    assert report.exit_code is Exit.LOST
    assert not report.digests_equal
    found = report.divergence
    assert found is not None
    assert found.round >= 0
    assert sorted(rank for side in found.sides for rank in side) == [0, 1, 2, 3]
    assert len(found.sides) > 1
    assert " against " in found.operation


async def test_a_worker_that_is_killed_ends_the_replay_with_its_name(nothing_is_left_behind: list[Child]) -> None:
    def kill(_: int) -> None:
        (victim,) = [child for child in nothing_is_left_behind if child.name == "worker of rank 1"]
        os.kill(victim.pid, signal.SIGKILL)

    plan = plan_replay(ReplayOptions(ranks=2, jitter_s={0: 0.01}))
    with pytest.raises(PeerUnavailable, match="worker of rank 1: was killed by SIGKILL"):
        await replay(plan, kill)


async def test_an_engine_that_is_killed_ends_the_replay_with_its_name(nothing_is_left_behind: list[Child]) -> None:
    def kill(_: int) -> None:
        (victim,) = [child for child in nothing_is_left_behind if child.name == "engine of rank 1"]
        os.kill(victim.pid, signal.SIGKILL)

    plan = plan_replay(ReplayOptions(ranks=2, jitter_s={0: 0.01}))
    with pytest.raises(PeerUnavailable, match="engine of rank 1: was killed by SIGKILL"):
        await replay(plan, kill)


async def test_a_replay_that_is_asked_to_stop_ends_in_good_order(capsys: pytest.CaptureFixture[str]) -> None:
    stop = Stop()
    reports: list[ReplayReport] = []
    plan = plan_replay(ReplayOptions(ranks=2, jitter_s={0: 0.01}))
    code = await asyncio.wait_for(_play(plan, stop, lambda _: stop.request("SIGINT"), reports), 60)
    assert (code, reports) == (INTERRUPTED, [])
    assert capsys.readouterr().err == "kvcoord: stopped by SIGINT\n"
