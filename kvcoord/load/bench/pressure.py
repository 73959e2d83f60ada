"""`kvcoord bench load`: many requests a second through real workers for minutes, arriving as a trace says.

Open loop: arrivals do not wait for the cache, so queueing shows in the latencies. Without a speed-up the rate is one
that the group was seen to keep up with just before. Every second the memory, the descriptors and the processor time of
every process are read; at the end neither memory nor descriptors may have grown.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.load.bench.arrivals import Stage, Told, arrivals
from kvcoord.load.bench.host import Usage, machine_busy_s, usage
from kvcoord.load.bench.players import Heard, players
from kvcoord.load.bench.pressure_charts import busy_chart, latency_charts, rate_chart, usage_charts
from kvcoord.load.bench.rate import BEHIND_MAX_S, SHARE, Found, find_rate
from kvcoord.load.bench.result import Result, Series
from kvcoord.load.plan import ReplayOptions, plan_replay
from kvcoord.load.trace import read

SAMPLE_S: Final = 1.0
GROWTH_MAX: Final = 0.10
GROWTH_FLOOR_BYTES: Final = 8 << 20
"""Memory is flat when the last quarter of a run uses at most so much more than its second quarter."""


BEHIND_SHARE_MAX: Final = 0.05
"""A group keeps up that is late in no more of its seconds."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is played. `speed_up`: requests of the trace arrive so much faster; None: as fast as is kept up with."""

    replay: ReplayOptions
    speed_up: float | None = None
    seconds: float = 60.0
    step_s: float = 0.01


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run showed. Latencies of all ranks, from a request's arrival to its pages being held.

    `offered_per_s`: requests that arrived, by the seconds in which they did; `served_per_s`: by the seconds until the
    last one was served. `behind_share`: of all engines' seconds, those at whose end it was late; with more than a few
    of them (`kept_up` false) the latencies are those of a queue.
    """

    case: str
    ranks: int
    seconds: float
    requests: int
    offered_per_s: float
    served_per_s: float
    behind_share: float
    kept_up: bool
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    step_p50_us: float
    step_p99_us: float
    steps_late: int
    skipped: int
    hit_share: float
    pages_corrupt: int


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process over the run. `flat`: neither its memory nor its descriptors have grown."""

    process: str
    memory_mb_before: float
    memory_mb_after: float
    descriptors_before: int
    descriptors_after: int
    cpu_share: float
    flat: bool


class Sample(msgspec.Struct, frozen=True):
    """All processes, and the machine with all that runs on it, at one moment: seconds since the beginning."""

    at_s: float
    usages: dict[str, Usage]
    machine_busy_s: float = 0.0


async def load(options: LoadOptions, on_case: Callable[[str], None] = lambda _: None) -> list[Result]:
    """Plays it. The results: what engines saw, what the processes used and, if it was looked for, the rate."""
    plan = plan_replay(options.replay)
    found, speed_up = None, options.speed_up
    if speed_up is None:
        found = await find_rate(plan, options.step_s, on_case)
        speed_up = found.speed_up
    stages = [Stage(speed_up, options.seconds)]
    heard: list[list[Heard]] = [[] for _ in range(plan.group.world_size)]

    def note(rank: int, word: Heard) -> None:
        heard[rank].append(word)
        served = sum(len(each.said.latency_ms) for each in heard[rank])
        on_case(f"{word.at_s:.0f} s, {served:,} requests served, {word.said.waiting} waiting")

    async with players(plan, stages, options.step_s) as playing:
        begun_s = playing.begin()
        sampling = asyncio.create_task(_sample(playing.pids, begun_s))
        try:
            await playing.listen(begun_s, note)
        finally:
            sampling.cancel()
        samples = await sampling
        await playing.finish()
    arriving_s = [at_s for at_s, _ in arrivals(read(options.replay.trace), stages)]
    results = [_engines(options, speed_up, arriving_s, heard), _processes(samples)]
    return results if found is None else [*results, _rates(found)]


async def _sample(processes: dict[str, int], begun_s: float) -> list[Sample]:
    """Reads all processes every second until it is cancelled."""
    samples: list[Sample] = []
    try:
        while True:
            usages = {name: usage(pid) for name, pid in processes.items()}
            samples.append(Sample(time.monotonic() - begun_s, usages, machine_busy_s()))
            await asyncio.sleep(SAMPLE_S)
    except asyncio.CancelledError:
        return samples


def _engines(options: LoadOptions, speed_up: float, arriving_s: list[float], heard: list[list[Heard]]) -> Result:
    row = load_row(options, speed_up, len(arriving_s), heard)
    notes = [
        f"Engines step every {options.step_s * 1000:g} ms and admit what has arrived; latency counts from arrival to"
        " the request's pages being held, so half a step of it is the step itself, and none is left out because an"
        " engine was late.",
    ]
    if not row.kept_up:
        notes.append(
            f"The group did not keep up: {row.offered_per_s:.3g} requests/s offered, {row.served_per_s:.3g} served, and"
            f" an engine was more than {BEHIND_MAX_S:g} s late in {row.behind_share:.0%} of the run. The latencies are"
            " those of a queue: give a lower --speed-up, or look whether the machine was busy with something else."
        )
    return Result(
        name="load",
        title=f"Open-loop load on {row.ranks} ranks: what engines saw",
        rows=[row],
        charts=[rate_chart(arriving_s, heard[0]), *latency_charts(heard)],
        notes=notes,
    )


def load_row(options: LoadOptions, speed_up: float, arrived: int, heard: Sequence[Sequence[Heard]]) -> LoadRow:
    """The outcome of one run in which `arrived` requests were offered to each rank."""
    words: list[Told] = [word.said for by_engine in heard for word in by_engine]
    latency = Series("latency", [ms for said in words for ms in said.latency_ms])
    step = Series("step", [micros for said in words for micros in said.step_us])
    first = [word.said for word in heard[0]]
    requests = sum(len(said.latency_ms) for said in first)
    seconds = max(by_engine[-1].at_s for by_engine in heard)
    arriving = [word.said for by_engine in heard for word in by_engine if word.at_s <= options.seconds]
    behind_share = sum(said.behind_s > BEHIND_MAX_S for said in arriving) / max(len(arriving), 1)
    return LoadRow(
        case=f"{Path(options.replay.trace).stem} x {speed_up:.3g}",
        ranks=len(heard),
        seconds=seconds,
        requests=requests,
        offered_per_s=arrived / options.seconds,
        served_per_s=requests / seconds,
        behind_share=behind_share,
        kept_up=behind_share <= BEHIND_SHARE_MAX,
        p50_ms=latency.quantile(0.5),
        p90_ms=latency.quantile(0.9),
        p99_ms=latency.quantile(0.99),
        max_ms=latency.quantile(1.0),
        step_p50_us=step.quantile(0.5),
        step_p99_us=step.quantile(0.99),
        steps_late=max(sum(word.said.steps_late for word in by_engine) for by_engine in heard),
        skipped=sum(said.skipped for said in first),
        hit_share=sum(said.pages_hit for said in first) / max(sum(said.pages for said in first), 1),
        pages_corrupt=sum(said.pages_corrupt for said in words),
    )


def _processes(samples: list[Sample]) -> Result:
    rows = [process_row(name, samples) for name in samples[0].usages]
    return Result(
        name="processes",
        title="Open-loop load: what each process used",
        rows=rows,
        charts=[
            *usage_charts([(sample.at_s, sample.usages) for sample in samples]),
            busy_chart([(sample.at_s, sample.usages, sample.machine_busy_s) for sample in samples]),
        ],
        notes=[
            "Before is the second quarter of the run, after its last quarter. A process is flat when its memory grew by"
            f" at most {GROWTH_MAX:.0%} or {GROWTH_FLOOR_BYTES >> 20} MiB in between, and its descriptors not at all.",
            "A coordinator, and for each rank a worker (kvcoord's sidecar) and an engine (which plays the requests),"
            " all of them on this machine.",
        ],
    )


def _rates(found: Found) -> Result:
    return Result(
        name="rate",
        title="Open-loop load: which rate the group keeps up with",
        rows=found.rows,
        notes=[
            f"Requests arrive faster in every stage until steps begin more than {BEHIND_MAX_S:g} s late for longer than"
            f" a stall. The long run is offered {SHARE:.0%} of the last rate that was kept up.",
        ],
    )


def process_row(name: str, samples: Sequence[Sample]) -> ProcessRow:
    """Compares the second quarter of the run with its last."""
    usages = [sample.usages[name] for sample in samples]
    quarter = max(len(usages) // 4, 1)
    before, after = usages[quarter : 2 * quarter] or usages[:1], usages[-quarter:]
    memory_before, memory_after = (_mean([use.resident_bytes for use in part]) for part in (before, after))
    most_before, most_after = (max(use.descriptors for use in part) for part in (before, after))
    elapsed_s = samples[-1].at_s - samples[0].at_s
    grown = memory_after - memory_before > max(memory_before * GROWTH_MAX, GROWTH_FLOOR_BYTES)
    return ProcessRow(
        process=name,
        memory_mb_before=memory_before / 1e6,
        memory_mb_after=memory_after / 1e6,
        descriptors_before=most_before,
        descriptors_after=most_after,
        cpu_share=(usages[-1].cpu_s - usages[0].cpu_s) / elapsed_s if elapsed_s else 0.0,
        flat=not grown and most_after <= most_before,
    )


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
