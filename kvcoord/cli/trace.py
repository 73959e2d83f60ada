"""`kvcoord trace`: request traces, made from a seed or counted."""

from pathlib import Path

import click
import msgspec

from kvcoord.cli.options import json_option
from kvcoord.load.generate import PRESETS
from kvcoord.load.generate import generate as generate_requests
from kvcoord.load.trace import Statistics, read, statistics, write


@click.group()
def command() -> None:
    """Make and measure request traces."""


@command.command()
@click.option("--preset", type=click.Choice(sorted(PRESETS)), default="conversation", show_default=True)
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Requests; the preset's number when not given.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same trace.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True)
@json_option
def generate(preset: str, requests: int | None, seed: int, output: Path, as_json: bool) -> None:
    """Write a trace with the statistics of a public one to FILE."""
    shape = PRESETS[preset]
    if requests is not None:
        shape = msgspec.structs.replace(shape, requests=requests)
    made = list(generate_requests(shape, seed))
    write(output, made)
    _show(output, statistics(made), as_json)


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@json_option
def stats(file: Path, requests: int | None, as_json: bool) -> None:
    """Count the requests of a trace, its pages, and the hits of a cache that never fills."""
    _show(file, statistics(read(file, requests)), as_json)


def _show(file: Path, counted: Statistics, as_json: bool) -> None:
    if as_json:
        numbers = {"file": str(file), **msgspec.to_builtins(counted), "hit_ratio": counted.hit_ratio}
        click.echo(msgspec.json.encode(numbers).decode())
        return
    rows = {
        "file": str(file),
        "requests": f"{counted.requests:,}",
        "pages": f"{counted.pages:,}",
        "pages distinct": f"{counted.pages_distinct:,}",
        "pages hit": f"{counted.pages_hit:,} ({counted.hit_ratio:.1%})",
        "duration": f"{counted.duration_ms / 1000:,.1f} s",
    }
    for name, value in rows.items():
        click.echo(f"{name:<16}{value}")
