"""Replays with a sliding window and a state beside the pages: real processes, and bytes verified in every pool."""

from typing import Any

import pytest

from kvcoord.load.plan import ReplayOptions, plan_replay
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport
from kvcoord.runtime.exits import Exit

REQUESTS = 150

TIGHT = {"device_pages": (260,), "host_pages": (300, 299)}


async def played(**options: Any) -> ReplayReport:
    return await replay(plan_replay(ReplayOptions(hybrid=True, requests_max=REQUESTS, **options)))


@pytest.mark.parametrize(
    "options",
    [{"ranks": 2}, {"ranks": 2, **TIGHT}, {"ranks": 4, "tp": 2, "pp": 2, "lag": 2, "settle": True}],
    ids=["as the trace says", "tight", "two stages"],
)
async def test_pages_windows_and_states_come_back_with_their_bytes_and_none_leaks(options: dict[str, Any]) -> None:
    report = await played(**options)
    assert report.differences == []
    assert report.leaks == []
    assert (report.pages_corrupt, report.loads_failed, report.requests) == (0, 0, REQUESTS)
    assert report.pages_hit_by_tier["host"] > 0
    assert report.pages_hit_by_tier["device"] > 0
    assert report.exit_code is Exit.OK


async def test_a_coordinator_that_is_killed_costs_no_end_of_a_sequence() -> None:
    slowly = {"ranks": 2, "settle": True, "jitter_s": {0: 0.004}}
    undisturbed = await played(**slowly)
    report = await played(**slowly, restart=True, kill_coordinator=40)
    assert (report.differences, report.leaks, report.pages_corrupt) == ([], [], 0)
    assert report.coordinators_lost == 1
    assert report.pages_hit_by_tier == undisturbed.pages_hit_by_tier
