"""`kvcoord simulate`: the production machines under seeded faults, explored exhaustively, or broken on purpose."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcoord.cli.options import json_option
from kvcoord.simulation.campaign import OnProgress, SimulationReport, campaign
from kvcoord.simulation.exploration import explore_scopes
from kvcoord.simulation.shape import Options
from kvcoord.simulation.variants import search_all

STORY_LINES_SHOWN: Final = 60


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True, help="How many worlds to run.")
@click.option("--seed", type=int, default=0, show_default=True, help="The first seed; the others follow it.")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Ranks of the group.")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks. Default: drawn.")
@click.option("--pp", type=click.IntRange(1), help="Pipeline stages. Default: drawn.")
@click.option("--lag", type=click.IntRange(1), help="Steps until a verdict applies. Default: drawn.")
@click.option("--hybrid/--no-hybrid", default=None, help="Pools that keep only the end of a sequence. Default: drawn.")
@click.option("--replicated/--no-replicated", default=None, help="Ranks that keep each host page once. Default: drawn.")
@click.option("--steps", type=click.IntRange(4), default=40, show_default=True, help="Steps that engines run at least.")
@click.option("--variants", is_flag=True, help="Break the machines on purpose, and show what finds each break.")
@click.option("--explore", is_flag=True, help="Explore small groups exhaustively, and count the states.")
@json_option
def command(
    *,
    seeds: int,
    seed: int,
    ranks: int,
    tp: int | None,
    pp: int | None,
    lag: int | None,
    hybrid: bool | None,
    replicated: bool | None,
    steps: int,
    variants: bool,
    explore: bool,
    as_json: bool,
) -> None:
    """Run the production machines in simulated time, under faults drawn from seeds, and check every promise.

    The same seed gives the same run. Ends with exit code 1 when a promise was broken.
    """
    console = Console(stderr=True)
    if explore:
        sys.exit(_explore(console, as_json=as_json))
    if variants:
        sys.exit(_search_variants(console, as_json=as_json))
    options = Options(ranks=ranks, tp=tp, pp=pp, lag=lag, hybrid=hybrid, replicated=replicated, steps=steps)
    with _bar(console, seeds) as on_progress:
        report = campaign(options, range(seed, seed + seeds), on_progress)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)
    sys.exit(1 if report.violations else 0)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("seeds", total=total)
        yield lambda done, broken: bar.update(
            task, completed=done, description=f"seeds ({broken} broken)" if broken else "seeds"
        )


def _explore(console: Console, *, as_json: bool) -> int:
    """Every small group. Returns the exit code."""
    found = explore_scopes(lambda explored: console.print(f"{explored.scope}: {explored.states:,} states"))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        table = Table(
            "group", "states", "all of them", "with a commit", "with an abort", "violation", title="exploration"
        )
        for one in found:
            complete = "yes" if one.complete else "bounded"
            table.add_row(
                one.scope, f"{one.states:,}", complete, f"{one.commits:,}", f"{one.aborts:,}", one.violation or "none"
            )
        Console().print(table)
        for one in found:
            for line in one.path:
                Console().print(f"  {line}", markup=False)
    return 1 if any(one.violation for one in found) else 0


def _search_variants(console: Console, *, as_json: bool) -> int:
    """Every broken variant. Returns the exit code: 1 when one was not found."""
    with warnings.catch_warnings():
        # Reservations that a broken machine drops warn, as they should.
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(search_all(on_found=lambda row: console.print(f"{row.variant}: {row.found_by or 'NOT FOUND'}")))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        table = Table("variant", "what is broken", "found by", "after", title="broken variants")
        for row in found:
            table.add_row(row.variant, row.breaks, row.found_by or "NOT FOUND", row.after)
        Console().print(table)
    return 0 if all(row.found_by for row in found) else 1


def _show(report: SimulationReport) -> None:
    console = Console()
    for finding in report.violations:
        console.print(
            f"seed {finding.seed}: {finding.promise} broken at {finding.at_s:.4f} s: {finding.detail}", markup=False
        )
        for fault in finding.faults:
            console.print(f"  with fault {fault}", markup=False)
        for line in finding.story[-STORY_LINES_SHOWN:]:
            console.print(f"    {line}", markup=False, soft_wrap=True)
    table = Table(title="simulation", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name in ("seeds", "steps", "operations", "recoveries"):
        table.add_row(name, f"{getattr(report, name):,}")
    for kind, count in sorted(report.faults.items()):
        table.add_row(f"fault {kind}", f"{count:,}")
    for promise, count in report.promises.items():
        table.add_row(f"promise {promise} checked", f"{count:,}")
    table.add_row("violations", f"{len(report.violations):,}")
    console.print(table)
