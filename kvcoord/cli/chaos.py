"""`kvcoord chaos`: a replay while processes are killed, stopped and cut off at random."""

import asyncio
import secrets
import sys
from typing import Final

import click
import msgspec
from rich.console import Console

from kvcoord.cli.options import json_option
from kvcoord.load.chaos.report import ChaosSummary, table
from kvcoord.load.chaos.run import run as run_chaos
from kvcoord.runtime.exits import Exit
from kvcoord.runtime.process import Stop, run

SHUTDOWN_TIMEOUT_S: Final = 20.0
"""Longer than it takes to end all children."""

INTERRUPTED: Final = 130


@click.command()
@click.option("--seconds", type=click.FloatRange(1, 86400), default=60.0, show_default=True)
@click.option("--seed", type=click.IntRange(0), help="Chooses the faults. Default: a fresh one, which is printed.")
@click.option("--ranks", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--replicated", is_flag=True, help="Ranks hold the same bytes (MLA): each host page is kept once.")
@json_option
def command(*, seconds: float, seed: int | None, ranks: int, replicated: bool, as_json: bool) -> None:
    """Replay a trace while coordinators, workers and engines are killed, stopped and cut off.

    Two coordinators, and for every rank a worker and an engine, are kept running as a service manager would. At the end
    the promises are checked from the outside. Ends with exit code 0 only if all were kept.
    """
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    if not as_json:
        click.echo(f"seed {chosen}")
    found: list[ChaosSummary] = []

    async def main(stop: Stop) -> int:
        playing = asyncio.ensure_future(run_chaos(chosen, seconds, ranks, replicated=replicated))
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait({playing, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not playing.done():
            playing.cancel()
            await asyncio.wait({playing})
            return INTERRUPTED
        found.append(playing.result())
        return Exit.FAILURE if found[0].violations else Exit.OK

    code = run(main, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
    for summary in found:
        if as_json:
            click.echo(msgspec.json.encode(summary).decode())
        else:
            Console().print(*table(summary), sep="\n")
    sys.exit(code)
