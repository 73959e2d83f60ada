"""Open-loop load: arrivals follow the trace alone, growth is noticed, and a short run serves everything."""

import pytest

from kvcoord.load.bench.arrivals import Stage, Told, arrivals
from kvcoord.load.bench.host import Usage, machine_busy_s
from kvcoord.load.bench.players import Heard
from kvcoord.load.bench.pressure import LoadOptions, LoadRow, ProcessRow, Sample, load, load_row, process_row
from kvcoord.load.bench.pressure_charts import busy_chart, rate_chart
from kvcoord.load.bench.rate import BEHIND_MAX_S, RateRow, find_rate, stage_row
from kvcoord.load.plan import ReplayOptions, plan_replay
from kvcoord.load.trace import Request

TRACE = [Request(timestamp_ms, 512, 1, (number,)) for number, timestamp_ms in enumerate((1000, 2000, 4000))]


def test_requests_arrive_at_their_time_by_the_speed_up() -> None:
    assert [(at_s, request.hash_ids) for at_s, request in arrivals(TRACE, [Stage(2.0, 1.6)])] == [
        (0.0, (0,)),
        (0.5, (1,)),
        (1.5, (2,)),
    ]


def test_a_trace_that_ends_begins_again_later_than_it_ended() -> None:
    times = [at_s for at_s, _ in arrivals(TRACE, [Stage(1.0, 10.0)])]
    assert times == [0.0, 1.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0]


def test_the_next_stage_goes_on_in_the_trace_where_the_last_one_stopped() -> None:
    times = [at_s for at_s, _ in arrivals(TRACE, [Stage(1.0, 2.0), Stage(4.0, 1.0)])]
    assert times == [0.0, 1.0, 2.25, 2.5, 2.75]


def heard(at_s: float, behind_s: float, served: int = 0) -> Heard:
    said = Told(
        latency_ms=[5.0] * served,
        step_us=[100.0],
        behind_s=behind_s,
        steps_late=0,
        skipped=0,
        pages=served,
        pages_hit=0,
        pages_corrupt=0,
        waiting=0,
        done=False,
    )
    return Heard(at_s, said)


@pytest.mark.parametrize(
    ("behind_s", "kept_up"),
    [([0.0, 0.0], True), ([3.0, 0.01], True), ([0.3, 0.4], False), ([0.0, 9.0], True)],
)
def test_a_stall_that_is_made_good_is_no_sign_of_a_rate_too_high(behind_s: list[float], kept_up: bool) -> None:
    punctual = [heard(at_s, 0.0, served=2) for at_s in (5.0, 6.0, 7.0, 8.0)]
    other = [heard(5.0, 9.0), heard(6.0, 9.0), *map(heard, (7.0, 8.0), behind_s)]
    row = stage_row(1, Stage(10.0, 4.0), [0.0, 3.9, 4.0, 5.0, 7.9, 8.0], [punctual, other])
    assert (row.kept_up, row.offered_per_s, row.served_per_s) == (kept_up, 0.75, 2.0)


def test_an_engine_that_says_nothing_does_not_keep_up() -> None:
    row = stage_row(0, Stage(1.0, 4.0), [], [[heard(1.0, 0.0)], [heard(3.0, 0.0)]])
    assert not row.kept_up
    assert row.behind_ms > BEHIND_MAX_S * 1000


@pytest.mark.parametrize(
    ("late_seconds", "kept_up"), [([], True), ([9, 10], True), ([3], True), ([3, 4], False), ([7, 8], False)]
)
def test_a_run_that_was_late_for_more_than_moments_says_so(late_seconds: list[int], kept_up: bool) -> None:
    options = LoadOptions(replay=ReplayOptions(ranks=3), seconds=8.0)
    punctual = [heard(float(at_s), 0.0, served=3) for at_s in range(1, 11)]
    late = [heard(float(at_s), 2.0 if at_s in late_seconds else 0.1, served=3) for at_s in range(1, 11)]
    row = load_row(options, 2.0, 40, [punctual, late, punctual])
    assert (row.kept_up, row.offered_per_s, row.served_per_s, row.requests) == (kept_up, 5.0, 3.0, 30)


def test_what_others_took_of_the_machine_is_shown_beside_what_the_processes_took() -> None:
    def use(cpu_s: float) -> dict[str, Usage]:
        return {name: Usage(resident_bytes=1, cpu_s=cpu_s, threads=1, descriptors=1) for name in ("a", "b")}

    ours, all_of_it = busy_chart([(1.0, use(1.0), 50.0), (3.0, use(1.5), 53.0)]).lines
    assert (ours.points, all_of_it.points) == ([(3.0, 0.5)], [(3.0, 1.5)])
    assert machine_busy_s() > 0


def test_rates_over_time_are_by_the_seconds_between_two_words() -> None:
    chart = rate_chart([0.5, 1.5, 1.6, 3.0], [heard(1.0, 0.0, served=1), heard(3.0, 0.0, served=4)])
    offered, served = (line.points for line in chart.lines)
    assert (offered, served) == ([(1.0, 1.0), (3.0, 1.5)], [(1.0, 1.0), (3.0, 2.0)])


async def test_the_rate_is_looked_for_in_stages_that_get_faster() -> None:
    said: list[str] = []
    found = await find_rate(plan_replay(ReplayOptions(ranks=2)), 0.01, said.append, stage_s=0.25, stages_max=3)
    assert found.rows
    assert all(isinstance(row, RateRow) for row in found.rows)
    speeds = [row.speed_up for row in found.rows]
    assert speeds == sorted(speeds)
    assert found.speed_up > 0
    assert len(said) == len(found.rows)


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
