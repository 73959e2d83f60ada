"""`kvcoord replay`: play a request trace through real processes, and check every page."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcoord.cli.options import json_option
from kvcoord.config import EvictionPolicy
from kvcoord.domain import WritePolicy
from kvcoord.errors import UsageError
from kvcoord.load.plan import Agreeing, ReplayOptions, ReplayPlan, plan_replay
from kvcoord.load.replay import OnProgress, replay
from kvcoord.load.report import ReplayReport
from kvcoord.load.table import table
from kvcoord.runtime.process import Stop, run

RANKS_DEFAULT: Final = 2

SHUTDOWN_TIMEOUT_S: Final = 15.0
"""Longer than it takes to end all children."""

INTERRUPTED: Final = 130
"""What a shell expects of a command that ctrl-C has ended."""


def _page_counts(value: str) -> tuple[int, ...]:
    """`N`, or `N,N,...` with one number for each rank."""
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a number, nor numbers with commas between") from error


def _of_rank(value: str) -> tuple[int, float]:
    """`RANK=SECONDS`."""
    rank, _, seconds = value.partition("=")
    try:
        return int(rank), float(seconds)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not RANK=SECONDS, for example 1=0.05") from error


def _choice(values: type[WritePolicy] | type[EvictionPolicy] | type[Agreeing]) -> click.Choice[str]:
    return click.Choice([value.value for value in values])


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of a replay, named as `ReplayOptions` names them."""
    decorators = [
        click.argument("trace", required=False),
        click.option("--ranks", type=click.IntRange(1), help=f"Ranks. Default: tp x pp, else {RANKS_DEFAULT}."),
        click.option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks. Default: ranks / pp."),
        click.option("--pp", type=click.IntRange(1), help="Pipeline stages. Default: 1."),
        click.option("--lag", type=click.IntRange(1), help="Steps until a verdict applies. Default: pp."),
        click.option("--requests", "requests_max", type=click.IntRange(1), help="Play only so many requests."),
        click.option("--pools", type=click.Choice(["unlimited"]), help="Pools that hold the whole trace."),
        click.option(
            "--device-pages", type=_page_counts, metavar="N[,N...]", help="On device: N, or one for each rank, N,N."
        ),
        click.option(
            "--host-pages", type=_page_counts, metavar="N[,N...]", help="On the host: N, or one for each rank, N,N."
        ),
        click.option("--page-bytes", type=click.IntRange(1), help="Bytes of a page in one layer. Default: 256."),
        click.option("--layers", type=click.IntRange(1), help="Layers on one rank. Default: 4."),
        click.option("--policy", type=_choice(WritePolicy), help="When pages go to the host. Default: write-through."),
        click.option("--eviction", type=_choice(EvictionPolicy), help="Which pages go first. Default: lru."),
        click.option("--agreement", type=_choice(Agreeing), help="How the ranks agree. Default: kvcoord."),
        click.option("--hybrid", is_flag=True, help="Beside the pages a sliding window and a state in small pools."),
        click.option(
            "--replicated",
            is_flag=True,
            help="Ranks of a stage hold the same bytes (MLA): each host page is kept once.",
        ),
        click.option("--settle", is_flag=True, help="Let every operation end before the next request."),
        click.option("--speed-up", type=float, help="Requests arrive so much faster. Default: they do not wait."),
        click.option("--standby", is_flag=True, help="List a second coordinator, for when the first one is lost."),
        click.option("--restart", is_flag=True, help="Start a coordinator again that has died."),
        click.option(
            "--kill-coordinator", type=click.IntRange(1), metavar="N", help="Kill it (SIGKILL) after N requests."
        ),
        click.option(
            "--slow-copy",
            "slow_copy_s",
            type=_of_rank,
            metavar="RANK=SECONDS",
            multiple=True,
            help="Delay copies of a rank.",
        ),
        click.option(
            "--jitter",
            "jitter_s",
            type=_of_rank,
            metavar="RANK=SECONDS",
            multiple=True,
            help="Delay steps of a rank at random.",
        ),
    ]
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


@click.command()
@_options
@click.option("--progress", is_flag=True, help="Show progress even when standard error is not a terminal.")
@json_option
def command(*, progress: bool, as_json: bool, **options: Any) -> None:
    """Play a request trace through real processes, and check every page.

    Starts a coordinator, and for every rank a worker and a lockstep engine. Without TRACE the small one that ships with
    kvcoord is played. Ends with exit code 0 only if no page leaked, every page read was right and all ranks are equal.
    """
    plan = plan_replay(_replay_options(options))
    console = Console(stderr=True)
    with _bar(console, plan, shown=progress or console.is_terminal) as on_progress:
        reports: list[ReplayReport] = []
        code = run(lambda stop: _play(plan, stop, on_progress, reports), shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
    for report in reports:
        _show(report, as_json=as_json)
    sys.exit(code)


def _replay_options(options: dict[str, Any]) -> ReplayOptions:
    """What was given; the rest keeps its default."""
    given = {name: value for name, value in options.items() if value is not None}
    given["unlimited"] = given.pop("pools", None) is not None
    if "ranks" not in given and "tp" not in given:
        given["ranks"] = max(RANKS_DEFAULT, given.get("pp", 1))
    for name in ("slow_copy_s", "jitter_s"):
        given[name] = _by_rank(name, given[name])
    return msgspec.convert(given, ReplayOptions)


def _by_rank(name: str, pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    by_rank = dict(pairs)
    if len(by_rank) != len(pairs):
        raise UsageError(name.removesuffix("_s").replace("_", "-"), list(pairs), "name every rank once")
    return by_rank


async def _play(plan: ReplayPlan, stop: Stop, on_progress: OnProgress, reports: list[ReplayReport]) -> int:
    """Plays until the end, or until the process is asked to stop. Every child is gone afterwards."""
    playing = asyncio.ensure_future(replay(plan, on_progress))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({playing, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not playing.done():
        playing.cancel()
        await asyncio.wait({playing})
        click.echo(f"kvcoord: stopped by {stop.cause}", err=True)
        return INTERRUPTED
    reports.append(playing.result())
    return reports[-1].exit_code


@contextmanager
def _bar(console: Console, plan: ReplayPlan, *, shown: bool) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task("requests", total=plan.request_count)
        yield lambda done: bar.update(task, completed=done)


def _show(report: ReplayReport, *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        Console().print(table(report))
