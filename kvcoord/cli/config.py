"""`kvcoord config`: what a process would run with, and where each value came from."""

from pathlib import Path
from typing import Any

import click
import msgspec

from kvcoord.cli.configuration import load_config
from kvcoord.cli.options import json_option, set_option
from kvcoord.config import CoordinatorConfig, Loaded, Option, WorkerConfig, explain, resolved

_PROCESSES: dict[str, type[msgspec.Struct]] = {"coordinator": CoordinatorConfig, "worker": WorkerConfig}


@click.command()
@click.argument("process", type=click.Choice(sorted(_PROCESSES)), default="coordinator")
@click.option(
    "--file", "--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="YAML or TOML file to read."
)
@click.option("--rank", type=int, metavar="N", help="Rank of the worker.")
@click.option("--explain", "explained", is_flag=True, help="List every option with its default and meaning instead.")
@set_option
@json_option
def command(
    process: str, file: Path | None, rank: int | None, explained: bool, assignments: tuple[str, ...], as_json: bool
) -> None:
    """Show the resolved configuration of a coordinator or a worker, with the source of every value."""
    if explained:
        _list_options(explain(_PROCESSES[process]), as_json)
        return
    loaded: Loaded[Any]
    if process == "coordinator":
        loaded = load_config(CoordinatorConfig, file, assignments, {})
    else:
        loaded = load_config(WorkerConfig, file, assignments, {"rank": rank})
    if as_json:
        shown = {"config": loaded.config, "sources": dict(loaded.sources)}
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        click.echo(resolved(loaded), nl=False)


def _list_options(options: list[Option], as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(options)).decode())
        return
    for option in options:
        default = f", default {option.default}" if option.default else ", required"
        variable = f" [{option.variable}]" if option.variable else ""
        click.echo(f"{option.name}: {option.type}{default}{variable}\n    {option.description}")
