"""`kvcoord bench`: what kvcoord costs, each part beside its peer in the same run on the same machine."""

import asyncio
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console

from kvcoord.cli.options import json_option
from kvcoord.errors import UsageError
from kvcoord.load.bench.cells import table
from kvcoord.load.bench.host import where
from kvcoord.load.bench.html import page
from kvcoord.load.bench.index import PeerPlace
from kvcoord.load.bench.pressure import LoadOptions
from kvcoord.load.bench.replays import TraceOptions
from kvcoord.load.bench.result import Result
from kvcoord.load.bench.suite import Benchmark, SuiteOptions
from kvcoord.load.bench.suite import run as run_suite
from kvcoord.load.plan import ReplayOptions
from kvcoord.load.trace import DEMO
from kvcoord.runtime.process import Stop, run

RANKS_DEFAULT: Final = "2,4,8"
RANKS_MAX: Final = 64

SHUTDOWN_TIMEOUT_S: Final = 15.0
INTERRUPTED: Final = 130

PRINTED_WIDTH: Final = 180
"""Of a table that goes to a file."""


@click.command()
@click.argument("benchmark", type=click.Choice([name.value for name in Benchmark]))
@click.option("--ranks", default=RANKS_DEFAULT, show_default=True, metavar="N[,N...]", help="Group sizes to measure.")
@click.option("--quick", is_flag=True, help="Few samples: to see that it runs, not how fast it is.")
@click.option("--no-sidecar", is_flag=True, help="Leave out cases through a worker process.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a report with plots, in one file.")
@click.option("--sglang-python", type=click.Path(path_type=Path), metavar="PATH", help="Interpreter that has SGLang.")
@click.option(
    "--sglang-harness",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of sgl_cpu_harness, which runs SGLang without a GPU.",
)
@click.option("--trace", default=str(DEMO), metavar="FILE", help="load, trace: whose requests are played.")
@click.option("--requests", "requests_max", type=click.IntRange(1), help="trace: play only so many, in some turns.")
@click.option("--pools", type=click.Choice(["unlimited"]), help="trace: pools that hold the whole trace.")
@click.option("--speed-up", type=click.FloatRange(0.01), help="load: so much faster. Default: what is kept up with.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="load: for so long.")
@json_option
def command(
    *,
    benchmark: str,
    ranks: str,
    quick: bool,
    no_sidecar: bool,
    html: Path | None,
    sglang_python: Path | None,
    sglang_harness: Path | None,
    trace: str,
    requests_max: int | None,
    pools: str | None,
    speed_up: float | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure what kvcoord costs, each part beside its peer.

    \b
    agreement    decisions, steps and covered operations against gloo's all_reduce
    coordinator  votes a second, memory and idle cost of one coordinator core
    copy         pages between two memories, against one memcpy and torch indexing
    index        match, insert, split, evict, against SGLang's tree cores if named
    recovery     from kill -9 of the coordinator to the next agreed decision
    local        one call from an engine to its sidecar and back
    scale        cost of a round up to 1,024 ranks, and where one coordinator ends
    load         requests that arrive as a trace says, for minutes: latencies, memory, descriptors
    trace        a request trace with kvcoord and with gloo in turn: total time, engine-thread time a step
    budgets      all that was promised, with what was measured, met or not met
    all          everything but load and trace
    """
    numbers = _numbers(ranks)
    options = SuiteOptions(
        ranks=numbers,
        quick=quick,
        sidecar=not no_sidecar,
        sglang=_peer_place(sglang_python, sglang_harness),
        load=LoadOptions(replay=ReplayOptions(trace=trace, ranks=numbers[0]), speed_up=speed_up, seconds=seconds),
        trace=TraceOptions(trace=trace, ranks=numbers[0], requests_max=requests_max, unlimited=pools is not None),
    )
    place, results = where(), list[Result]()
    logging.getLogger("kvcoord").setLevel(logging.ERROR)
    code = run(
        lambda stop: _measure(Benchmark(benchmark), options, stop, results), shutdown_timeout_s=SHUTDOWN_TIMEOUT_S
    )
    if results:
        _show(Benchmark(benchmark), results, place, as_json=as_json)
        if html is not None:
            _write(html, page(results, place, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    sys.exit(code)


async def _measure(benchmark: Benchmark, options: SuiteOptions, stop: Stop, results: list[Result]) -> int:
    """Measures until the end, or until the process is asked to stop. Every child is gone afterwards."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        running = asyncio.ensure_future(run_suite(benchmark, options, status.update))
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            click.echo(f"kvcoord: stopped by {stop.cause}", err=True)
            return INTERRUPTED
        results += running.result()
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError("ranks", text, "give a number, or numbers with commas between, for example 2,4,8") from error
    if not 2 <= numbers[0] <= numbers[-1] <= RANKS_MAX:
        raise UsageError("ranks", text, f"give from 2 to {RANKS_MAX}")
    return numbers


def _peer_place(python: Path | None, harness: Path | None) -> PeerPlace | None:
    if python is None and harness is None:
        return None
    if python is None or harness is None:
        raise UsageError("sglang-python", str(python), "name both: --sglang-python and --sglang-harness")
    return PeerPlace(python, harness)


def _show(benchmark: Benchmark, results: list[Result], place: str, *, as_json: bool) -> None:
    """One benchmark as JSON is a list of rows, several are an object with a list for each."""
    if as_json:
        several = benchmark in (Benchmark.ALL, Benchmark.LOAD)
        rows = {result.name: result.rows for result in results}
        click.echo(msgspec.json.encode(rows if several else results[0].rows))
        return
    console = Console()
    if not console.is_terminal:
        console.width = PRINTED_WIDTH
    console.print(place, style="dim", highlight=False)
    for result in results if benchmark is not Benchmark.BUDGETS else results[:1]:
        console.print(table(result))
        for note in result.notes:
            console.print(f"- {note}", style="dim", highlight=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError("html", str(path), f"cannot be written ({error.strerror}); give another path") from error
    click.echo(f"report: {path}", err=True)
