"""What an engine of a replay does with the answers it gets: verifies, fills, waits for room, gives up."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from kvcoord.client import BlockingCacheClient
from kvcoord.domain import Aborted, Committed, PageKey, Path, Reason
from kvcoord.index.keys import block_page_keys
from kvcoord.load.dialogue import DriverPlan
from kvcoord.load.engine import Engine
from kvcoord.load.pace import Pace
from kvcoord.load.pages import EnginePages
from kvcoord.load.trace import Request
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.pages import PageMemory
from kvcoord.protocol.local import Advanced

COMMITTED = Committed("allocate/1/0", Path.COVERED)
FULL = Aborted("allocate/1/0", Path.IMMEDIATE, Reason.DEVICE_FULL, 1, {"device.kv": 2})
LAG = 2


class Lease(SimpleNamespace):
    """An acquired path, or an aborted one."""

    def __bool__(self) -> bool:
        return bool(self.outcome)


def granted(slots: Sequence[int], *, device: int = 0, host: int = 0, error: str = "", number: int = 1) -> Lease:
    loaded = [(device, host)] if host else []
    return Lease(
        outcome=COMMITTED,
        number=number,
        slots=[list(slots)],
        device_pages=device,
        host_pages=host,
        loaded=loaded,
        error=error,
    )


def refused(outcome: Aborted = FULL, *, device: int = 0) -> Lease:
    return Lease(outcome=outcome, slots=[], device_pages=device, host_pages=0, loaded=[], error="")


class Ticket(SimpleNamespace):
    def wait(self) -> Any:
        return self.result


class Cache:
    """A worker by script: one acquire after another, one number of open operations after another (then none).

    `broken` leases are told at a step.
    """

    def __init__(
        self,
        acquires: Sequence[Lease],
        operations_open: Sequence[int] = (),
        completes: bool = True,
        broken: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> None:
        self._broken = broken
        self.calls: list[str] = []
        self._acquires = list(acquires)
        self._open = list(operations_open)
        self._completes = completes
        self._before = 0

    def advance_nowait(self, step: int) -> Ticket:
        self.calls.append(f"advance {step}")
        operations_open = self._open.pop(0) if self._open else 0
        ended = ["write-through/1/0"] if self._completes and operations_open < self._before else []
        self._before = operations_open
        return Ticket(result=Advanced(step, -1, [], ended, [], operations_open, self._broken.get(step, [])))

    def acquire_nowait(self, keys: Sequence[PageKey]) -> Ticket:
        self.calls.append(f"acquire {len(keys)}")
        return Ticket(result=self._acquires.pop(0))

    def write_lease_nowait(self, lease: Lease, *, deferred: bool) -> Ticket:
        self.calls.append("write")
        return Ticket(result=SimpleNamespace(outcome=None))

    def release_nowait(self, lease: Lease) -> Ticket:
        self.calls.append("release")
        return Ticket(result=None)


@pytest.fixture
def memory() -> PageMemory:
    return PageMemory.anonymous(PoolGeometry("kv", 2, 64, "uint8"), 8)


def engine(
    cache: Cache, memory: PageMemory, *, alone: bool = False, pages_that_fit: int = 8, full_pages_only: bool = False
) -> Engine:
    plan = DriverPlan(
        bytes_of=0,
        rank=0,
        address="",
        trace="",
        requests_max=None,
        lag=LAG,
        pages_that_fit=pages_that_fit,
        settle=False,
        full_pages_only=full_pages_only,
        speed_up=0.0,
        jitter_s=0.0,
        alone=alone,
        call_timeout_s=1.0,
        upstream_fd=-1,
        downstream_fd=-1,
        progress=False,
    )
    pace = Pace(speed_up=0.0, jitter_s=0.0, seed=0, upstream=None, downstream=None, sleep=lambda _: None)
    return Engine(plan, cast(BlockingCacheClient, cache), [EnginePages(memory, 0)], pace, lambda count: count == 0)


def request(*hash_ids: int) -> Request:
    return Request(0, 1, 1, hash_ids)


def test_what_one_step_computed_is_handed_in_with_the_next_in_one_message(memory: PageMemory) -> None:
    cache = Cache([granted([0, 1]), granted([0, 1, 2], device=2)])
    playing = engine(cache, memory)
    playing.serve(request(1, 2))
    playing.serve(request(1, 2, 3))
    playing.settle()
    first, second = ["advance 0", "acquire 2"], ["write", "release", "advance 1", "acquire 3"]
    assert cache.calls == [*first, *second, "write", "release", *(f"advance {step}" for step in range(2, 4 + LAG))]
    assert (playing.tally.requests, playing.tally.pages_total, playing.tally.pages_hit_device) == (2, 5, 2)
    assert len(playing.step_ns) == len(playing.advance_ns) == 2


def test_a_path_can_end_before_its_last_page_which_is_seldom_full(memory: PageMemory) -> None:
    cache = Cache([granted([0, 1]), granted([0])])
    playing = engine(cache, memory, full_pages_only=True)
    playing.serve(request(1, 2, 3))
    playing.serve(request(4))
    assert [call for call in cache.calls if call.startswith("acquire")] == ["acquire 2", "acquire 1"]
    assert playing.tally.pages_total == 3


def test_pages_that_are_reused_are_verified_and_a_wrong_one_is_counted(memory: PageMemory) -> None:
    playing = engine(Cache([granted([0, 1, 2]), granted([0, 1, 2], device=1, host=2)]), memory)
    playing.serve(request(1, 2, 3))
    memory.view(1, 2)[5] ^= 1
    playing.serve(request(1, 2, 3))
    tally = playing.tally
    assert (tally.pages_verified, tally.pages_corrupt, tally.pages_loaded) == (3, 1, 2)


def test_only_new_pages_are_filled(memory: PageMemory) -> None:
    playing = engine(Cache([granted([4, 5, 6], device=2)]), memory)
    playing.serve(request(1, 2, 3))
    assert playing.tally.pages_corrupt == 2
    check = EnginePages(memory, 0)
    assert check.count_corrupt(block_page_keys((1, 2, 3)), [4, 5, 6]) == 2
    check.close()


def test_pages_whose_load_has_failed_are_not_judged(memory: PageMemory) -> None:
    playing = engine(Cache([granted([0, 1], host=1, error="broken")]), memory)
    playing.serve(request(1, 2))
    assert (playing.tally.loads_failed, playing.tally.pages_verified, playing.tally.pages_corrupt) == (1, 0, 0)


def test_a_request_whose_load_was_retracted_is_computed_once_more_and_counts_once(memory: PageMemory) -> None:
    """Also when this rank's own copy had landed, and the lease is released long since."""
    leases = [granted([0, 1], host=1, number=1), *(granted(slots, number=9) for slots in ([2], [0, 1], [3]))]
    cache = Cache(leases, broken={1: [1]})
    playing = engine(cache, memory)
    for hash_ids in ((1, 2), (3,), (4,)):
        playing.serve(request(*hash_ids))
    acquires = [call for call in cache.calls if call.startswith("acquire")]
    assert acquires == [f"acquire {pages}" for pages in (2, 1, 2, 1)]
    assert (playing.tally.requests, playing.tally.repeats, playing.tally.pages_total) == (3, 1, 4)


def test_a_request_without_room_is_tried_again_each_time_an_operation_has_ended(memory: PageMemory) -> None:
    cache = Cache([refused(), refused(), granted([0])], operations_open=[2, 2, 1, 1, 0])
    playing = engine(cache, memory)
    playing.serve(request(1))
    assert [call for call in cache.calls if call.startswith("acquire")] == ["acquire 1"] * 3
    assert (playing.tally.requests, playing.tally.retries, playing.tally.skipped) == (1, 2, 0)
    assert playing.tally.aborts_first == {Reason.DEVICE_FULL: FULL}


def test_the_last_try_comes_when_nothing_is_open_and_capacity_is_exact(memory: PageMemory) -> None:
    cache = Cache([refused(device=0), refused(device=0)])
    playing = engine(cache, memory)
    playing.serve(request(1))
    assert cache.calls == ["advance 0", "acquire 1", *(f"advance {step}" for step in range(1, 3 + LAG)), "acquire 1"]
    assert (playing.tally.requests, playing.tally.retries, playing.tally.skipped) == (1, 1, 1)


@pytest.mark.parametrize(
    ("outcome", "alone", "pages_that_fit"),
    [
        (FULL, False, 1),
        (FULL, True, 8),
        (Aborted("allocate/1/0", Path.IMMEDIATE, Reason.RANK_LOST), False, 8),
    ],
    ids=["can never fit", "decided alone", "another reason"],
)
def test_a_request_that_waiting_cannot_help_is_skipped_at_once_and_its_hits_count(
    memory: PageMemory, outcome: Aborted, alone: bool, pages_that_fit: int
) -> None:
    cache = Cache([refused(outcome, device=1)])
    playing = engine(cache, memory, alone=alone, pages_that_fit=pages_that_fit)
    playing.serve(request(1, 2))
    assert cache.calls == ["advance 0", "acquire 2"]
    assert (playing.tally.skipped, playing.tally.retries, playing.tally.pages_hit_device) == (1, 0, 1)


def test_settling_goes_on_until_nothing_is_open_and_then_for_the_lag(memory: PageMemory) -> None:
    cache = Cache([], operations_open=[3, 1, 1, 0])
    engine(cache, memory).settle()
    assert cache.calls == [f"advance {step}" for step in range(4 + LAG + 1)]
