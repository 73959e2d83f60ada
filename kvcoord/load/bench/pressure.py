"""`kvcoord bench load`: many requests a second through real workers for minutes, arriving as a trace says.

Open loop: arrivals do not wait for the cache, so queueing shows in the latencies. Every second the memory, the
descriptors and the processor time of every process are read; at the end none of them may have grown.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.load.bench.arrivals import ArrivalsPlan, Begin, FromEngine, Opened, Told
from kvcoord.load.bench.bed import write_config
from kvcoord.load.bench.host import Usage, usage
from kvcoord.load.bench.result import Chart, Line, Result, Series
from kvcoord.load.dialogue import line
from kvcoord.load.plan import CALL_TIMEOUT_S, ReplayOptions, ReplayPlan, plan_replay, worker_address
from kvcoord.runtime.children import KVCOORD, SERVE, Child, Children

SAMPLE_S: Final = 1.0
GROWTH_MAX: Final = 0.10
GROWTH_FLOOR_BYTES: Final = 8 << 20
"""Memory is flat when the last quarter of a run uses at most so much more than its second quarter."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is played. `speed_up`: requests of the trace arrive so much faster."""

    replay: ReplayOptions
    speed_up: float = 50.0
    seconds: float = 60.0
    step_s: float = 0.01


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run showed. Latencies of all ranks, from a request's arrival to its pages being held."""

    case: str
    ranks: int
    seconds: float
    requests: int
    requests_per_s: float
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
    """All processes at one moment, in seconds since the beginning."""

    at_s: float
    usages: dict[str, Usage]


async def load(options: LoadOptions, on_case: Callable[[str], None] = lambda _: None) -> list[Result]:
    """Plays it. The first result is what engines saw, the second what the processes used."""
    plan = plan_replay(options.replay)
    with tempfile.TemporaryDirectory(prefix="kvcoord-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with Children(keep_errors=True) as children:
            services = await _start_services(children, plan, folder)
            engines = await _start_engines(children, plan, options, folder)
            begun_s = time.monotonic() + 0.1
            for engine in engines:
                engine.say(line(Begin(begun_s)))
            sampling = asyncio.create_task(_sample({child.name: child.pid for child in (*services, *engines)}, begun_s))
            told = await asyncio.gather(*(_listen(engine, begun_s, on_case) for engine in engines))
            sampling.cancel()
            seconds = time.monotonic() - begun_s
            samples = await sampling
            for engine in engines:
                await engine.finish()
    return [_engines(plan, options, told, seconds), _processes(samples)]


async def _start_services(children: Children, plan: ReplayPlan, folder: Path) -> list[Child]:
    path = write_config(folder, "coordinator", plan.coordinator(0, folder))
    services = [await children.start("coordinator", [*KVCOORD, "coordinator", "--config", path, *SERVE])]
    for rank in range(plan.group.world_size):
        path = write_config(folder, f"rank{rank}", plan.worker(rank, folder))
        services.append(await children.start(f"worker {rank}", [*KVCOORD, "worker", "--config", path, *SERVE]))
    for service in services:
        await service.ready()
    return services


async def _start_engines(children: Children, plan: ReplayPlan, options: LoadOptions, folder: Path) -> list[Child]:
    engines = []
    for rank in range(plan.group.world_size):
        engine = await children.start(f"engine {rank}", ["-m", "kvcoord.load.bench.arrivals"], talks=True, generation=1)
        arrivals = ArrivalsPlan(
            rank=rank,
            address=worker_address(folder, rank),
            trace=options.replay.trace,
            speed_up=options.speed_up,
            seconds=options.seconds,
            step_s=options.step_s,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        engine.say(line(arrivals))
        engines.append(engine)
    for engine in engines:
        assert isinstance(msgspec.json.decode(await engine.hear(), type=FromEngine), Opened)
    return engines


async def _listen(engine: Child, begun_s: float, on_case: Callable[[str], None]) -> list[tuple[float, Told]]:
    """What one engine tells, with when it did."""
    told: list[tuple[float, Told]] = []
    served = 0
    while not told or not told[-1][1].done:
        said = msgspec.json.decode(await engine.hear(), type=FromEngine)
        assert isinstance(said, Told)
        told.append((time.monotonic() - begun_s, said))
        served += len(said.latency_ms)
        on_case(f"{told[-1][0]:.0f} s, {served:,} requests served, {said.waiting} waiting")
    return told


async def _sample(processes: dict[str, int], begun_s: float) -> list[Sample]:
    """Reads all processes every second until it is cancelled."""
    samples: list[Sample] = []
    try:
        while True:
            usages = {name: usage(pid) for name, pid in processes.items()}
            samples.append(Sample(time.monotonic() - begun_s, usages))
            await asyncio.sleep(SAMPLE_S)
    except asyncio.CancelledError:
        return samples


def _engines(plan: ReplayPlan, options: LoadOptions, told: list[list[tuple[float, Told]]], seconds: float) -> Result:
    words = [said for by_engine in told for _, said in by_engine]
    latency = Series("latency", [ms for said in words for ms in said.latency_ms])
    step = Series("step", [micros for said in words for micros in said.step_us])
    first = [said for _, said in told[0]]
    requests = sum(len(said.latency_ms) for said in first)
    row = LoadRow(
        case=f"{Path(options.replay.trace).name}, {options.speed_up:g} times as fast",
        ranks=plan.group.world_size,
        seconds=seconds,
        requests=requests,
        requests_per_s=requests / seconds,
        p50_ms=latency.quantile(0.5),
        p90_ms=latency.quantile(0.9),
        p99_ms=latency.quantile(0.99),
        max_ms=latency.quantile(1.0),
        step_p50_us=step.quantile(0.5),
        step_p99_us=step.quantile(0.99),
        steps_late=max(sum(said.steps_late for _, said in by_engine) for by_engine in told),
        skipped=sum(said.skipped for said in first),
        hit_share=sum(said.pages_hit for said in first) / max(sum(said.pages for said in first), 1),
        pages_corrupt=sum(said.pages_corrupt for said in words),
    )
    title = "Open-loop load: what engines saw"
    notes = [
        f"Engines step every {options.step_s * 1000:g} ms and admit what has arrived; latency counts from arrival,"
        " so half a step of it is the step itself.",
    ]
    return Result(name="load", title=title, rows=[row], charts=_latency_charts(told[0]), notes=notes)


def _latency_charts(told: list[tuple[float, Told]]) -> list[Chart]:
    series = [(at_s, Series("", said.latency_ms)) for at_s, said in told if said.latency_ms]
    quantiles = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    lines = [Line(name, [(at_s, each.quantile(share)) for at_s, each in series]) for name, share in quantiles]
    return [
        Chart(
            title="Latency of the requests of each second, rank 0",
            x_label="seconds",
            y_label="milliseconds",
            lines=lines,
            y_log=True,
        )
    ]


def _processes(samples: list[Sample]) -> Result:
    rows = [process_row(name, samples) for name in samples[0].usages]
    charts = [
        Chart(
            title="Resident memory",
            x_label="seconds",
            y_label="MB",
            lines=[
                Line(name, [(sample.at_s, sample.usages[name].resident_bytes / 1e6) for sample in samples])
                for name in samples[0].usages
            ],
        ),
        Chart(
            title="Open file descriptors",
            x_label="seconds",
            y_label="descriptors",
            lines=[
                Line(name, [(sample.at_s, float(sample.usages[name].descriptors)) for sample in samples])
                for name in samples[0].usages
            ],
        ),
    ]
    title = "Open-loop load: what the processes used"
    notes = ["Before is the second quarter of the run, after its last quarter."]
    return Result(name="processes", title=title, rows=rows, charts=charts, notes=notes)


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
