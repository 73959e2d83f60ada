"""Replays of ranks that hold the same bytes and keep each host page once: real processes, every page read verified."""

from typing import Any

import pytest

from kvcoord.domain import WritePolicy
from kvcoord.errors import ConfigError, UsageError
from kvcoord.load.plan import Agreeing, ReplayOptions, ReplayPlan, plan_replay
from kvcoord.load.replay import replay
from kvcoord.load.report import ReplayReport
from kvcoord.load.trace import DEMO, read, statistics
from kvcoord.runtime.exits import Exit

REQUESTS = 150
PAGE_BYTES = 256 * 4

TIGHT = {"device_pages": (260,), "host_pages": (300,)}


def plan(**options: Any) -> ReplayPlan:
    return plan_replay(ReplayOptions(**{"replicated": True, "requests_max": REQUESTS, **options}))


async def played(**options: Any) -> ReplayReport:
    report = await replay(plan(**options))
    assert report.differences == []
    assert report.leaks == []
    assert (report.pages_corrupt, report.loads_failed, report.requests) == (0, 0, REQUESTS)
    assert report.exit_code is Exit.OK
    return report


@pytest.mark.parametrize("ranks", [2, 4])
async def test_one_copy_of_each_page_goes_to_the_host_and_all_ranks_read_it(ranks: int) -> None:
    report = await played(ranks=ranks, unlimited=True)
    expected = statistics(read(DEMO, REQUESTS))
    assert (report.pages_hit, report.pages_total) == (expected.pages_hit, expected.pages)
    assert sum(report.host_pages_here) == sum(report.pages_to_host) == expected.pages_distinct
    assert report.bytes_moved == expected.pages_distinct * PAGE_BYTES
    assert max(report.host_pages_here) <= -(-expected.pages_distinct // ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4, "policy": WritePolicy.WRITE_BACK},
        {"ranks": 2, "policy": WritePolicy.WRITE_THROUGH_SELECTIVE},
        {"tp": 2, "pp": 2, "lag": 2, "slow_copy_s": {2: 0.002}},
    ],
    ids=["write-through", "write-back", "selective", "two stages"],
)
async def test_pages_are_evicted_loaded_back_and_right_where_pools_are_small(options: dict[str, Any]) -> None:
    report = await played(**TIGHT, **options)
    assert report.pages_evicted["device"] > 0
    assert sum(report.pages_to_host) > 0
    assert max(report.host_pages_here) <= -(-300 // report.tp)


async def test_hits_are_those_of_ranks_that_keep_every_page_themselves() -> None:
    each = await replay(plan_replay(ReplayOptions(ranks=2, requests_max=REQUESTS, settle=True)))
    once = await played(ranks=2, settle=True)
    assert once.pages_hit_by_tier == each.pages_hit_by_tier
    assert once.pages_hit_by_tier["host"] > 0
    assert sum(once.pages_to_host) * 2 == sum(each.pages_to_host)


async def test_a_coordinator_that_is_killed_costs_no_page() -> None:
    undisturbed = await played(ranks=2, settle=True)
    report = await played(ranks=2, settle=True, restart=True, kill_coordinator=40)
    assert report.coordinators_lost == 1
    assert report.pages_hit_by_tier == undisturbed.pages_hit_by_tier


@pytest.mark.parametrize(
    ("options", "field", "error"),
    [
        ({"ranks": 1}, "replicated", UsageError),
        ({"ranks": 2, "pp": 2}, "replicated", UsageError),
        ({"ranks": 2, "host_pages": (300, 299)}, "host-pages", UsageError),
        ({"ranks": 2, "agreement": Agreeing.GLOO}, "agreement", UsageError),
        ({"ranks": 2, "agreement": Agreeing.NONE}, "kv_replicas", ConfigError),
        ({"ranks": 2, "hybrid": True}, "kv_replicas", ConfigError),
    ],
)
def test_what_cannot_be_kept_once_is_refused(
    options: dict[str, Any], field: str, error: type[UsageError | ConfigError]
) -> None:
    with pytest.raises(error, match=field):
        plan(**options)
