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
from kvcoord.load.trace import DEMO
from kvcoord.runtime.process import Stop, run

RANKS_DEFAULT: Final = 2

SHUTDOWN_TIMEOUT_S: Final = 15.0
"""Longer than it takes to end all children."""

INTERRUPTED: Final = 130
"""What a shell expects of a command that ctrl-C has ended."""


class _PageCounts(click.ParamType):
    """`N`, or `N,N,...` with one number for each rank."""

    name = "pages"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a number, nor numbers with commas between", param, ctx)


class _OfRank(click.ParamType):
    """`RANK=SECONDS`."""

    name = "rank=seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        rank, _, seconds = str(value).partition("=")
        try:
            return int(rank), float(seconds)
        except ValueError:
            self.fail(f"{value!r} is not RANK=SECONDS, for example 1=0.05", param, ctx)


def _choice(values: type[WritePolicy] | type[EvictionPolicy] | type[Agreeing]) -> click.Choice[str]:
    return click.Choice([value.value for value in values])


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of a replay, named as `ReplayOptions` names them."""
    decorators = [
        click.argument("trace", default=str(DEMO), metavar="[TRACE]"),
        click.option("--ranks", type=click.IntRange(1), help=f"Ranks. Default: tp x pp, else {RANKS_DEFAULT}."),
        click.option("--tp", type=click.IntRange(1), default=0, help="Tensor-parallel ranks. Default: ranks / pp."),
        click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline stages. Default: 1."),
        click.option("--lag", type=click.IntRange(1), default=0, help="Steps until a verdict applies. Default: pp."),
        click.option("--requests", "requests_max", type=click.IntRange(1), help="Play only so many requests."),
        click.option("--pools", type=click.Choice(["unlimited"]), help="unlimited: pools that hold the whole trace."),
        click.option(
            "--device-pages", type=_PageCounts(), default="", help="Pages on device: N, or one per rank: N,N."
        ),
        click.option("--host-pages", type=_PageCounts(), default="", help="Pages on host: N, or one per rank: N,N."),
        click.option("--page-bytes", type=click.IntRange(1), default=256, help="Bytes of a page in a layer."),
        click.option("--layers", type=click.IntRange(1), default=4, help="Layers on a rank."),
        click.option("--policy", type=_choice(WritePolicy), default=WritePolicy.WRITE_THROUGH.value, help="Writes."),
        click.option("--eviction", type=_choice(EvictionPolicy), default=EvictionPolicy.LRU.value, help="Order."),
        click.option("--agreement", type=_choice(Agreeing), default=Agreeing.KVCOORD.value, help="How ranks agree."),
        click.option("--settle", is_flag=True, help="Let every operation end before the next request."),
        click.option("--speed-up", type=float, default=0.0, help="Arrivals, so much faster. Default: no waiting."),
        click.option("--slow-copy", "slow_copy_s", type=_OfRank(), multiple=True, help="Delay a rank's copies."),
        click.option("--jitter", "jitter_s", type=_OfRank(), multiple=True, help="Delay a rank's steps at random."),
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
    unlimited = options.pop("pools") == "unlimited"
    if not options["ranks"]:
        options["ranks"] = 0 if options["tp"] else max(RANKS_DEFAULT, options["pp"])
    for name in ("slow_copy_s", "jitter_s"):
        options[name] = _by_rank(name, options[name])
    return msgspec.convert({**options, "unlimited": unlimited}, ReplayOptions)


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
