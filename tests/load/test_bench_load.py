"""Open-loop load: arrivals follow the trace alone, growth is noticed, and a short run serves everything."""

import pytest

from kvcoord.load.bench.arrivals import arrivals
from kvcoord.load.bench.host import Usage
from kvcoord.load.bench.pressure import LoadOptions, LoadRow, ProcessRow, Sample, load, process_row
from kvcoord.load.plan import ReplayOptions
from kvcoord.load.trace import Request

TRACE = [Request(timestamp_ms, 512, 1, (number,)) for number, timestamp_ms in enumerate((1000, 2000, 4000))]


def test_requests_arrive_at_their_time_by_the_speed_up() -> None:
    assert [(at_s, request.hash_ids) for at_s, request in arrivals(TRACE, 2.0, 1.6)] == [
        (0.0, (0,)),
        (0.5, (1,)),
        (1.5, (2,)),
    ]


def test_a_trace_that_ends_begins_again_later_than_it_ended() -> None:
    times = [at_s for at_s, _ in arrivals(TRACE, 1.0, 10.0)]
    assert times == [0.0, 1.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0]


def samples(megabytes: list[int], descriptors: list[int]) -> list[Sample]:
    return [
        Sample(float(at), {"worker": Usage(resident_bytes=size << 20, cpu_s=at / 2, threads=1, descriptors=count)})
        for at, (size, count) in enumerate(zip(megabytes, descriptors, strict=True))
    ]


@pytest.mark.parametrize(
    ("megabytes", "descriptors", "flat"),
    [
        ([10, 80, 100, 100, 101, 100, 102, 101], [9] * 8, True),
        ([10, 80, 100, 100, 110, 120, 130, 140], [9] * 8, False),
        ([100] * 8, [9, 9, 9, 9, 9, 9, 9, 10], False),
        ([100] * 8, [3, 9, 9, 9, 9, 9, 8, 9], True),
    ],
)
def test_growth_after_the_first_quarter_is_noticed(megabytes: list[int], descriptors: list[int], flat: bool) -> None:
    row = process_row("worker", samples(megabytes, descriptors))
    assert row.flat is flat
    assert row.cpu_share == 0.5


@pytest.mark.timeout(120)
async def test_a_short_run_serves_every_request_that_arrives() -> None:
    options = LoadOptions(replay=ReplayOptions(ranks=2), speed_up=2000.0, seconds=1.0, step_s=0.005)
    engines, processes = await load(options)
    (row,) = engines.rows
    assert isinstance(row, LoadRow)
    assert row.requests > 0
    assert (row.skipped, row.pages_corrupt) == (0, 0)
    assert row.p50_ms <= row.p90_ms <= row.p99_ms <= row.max_ms
    names = [each.process for each in processes.rows if isinstance(each, ProcessRow)]
    assert names == ["coordinator", "worker 0", "worker 1", "engine 0", "engine 1"]
