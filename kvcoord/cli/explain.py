"""`kvcoord explain`: one operation's life on all ranks, told from their flight recorders."""

import sys

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcoord.cli.options import json_option
from kvcoord.cli.recorders import dumps_of
from kvcoord.observability.story import Line, story
from kvcoord.runtime.exits import Exit


@click.command()
@click.argument("operation")
@click.argument("sources", nargs=-1)
@click.option("--group", default="", metavar="NAME", help="Leave out what a coordinator knows of other groups.")
@json_option
def command(operation: str, sources: tuple[str, ...], group: str, as_json: bool) -> None:
    """Tell the life of OPERATION on all ranks, in order.

    SOURCES are dumps of flight recorders, folders of them, or HTTP addresses of running processes. A process writes a
    dump when ranks diverge, when its group is lost, when it fails, and when it gets SIGUSR1. Without SOURCES: the
    processes of the newest running `kvcoord up`, and the default folder of dumps.

    An operation's id is in every outcome, log line and error, for example write-through/17/0.
    """
    lines = story(dumps_of(sources), operation, group)
    if as_json:
        click.echo(msgspec.json.encode({"operation": operation, "events": lines}).decode())
    elif lines:
        Console().print(_table(operation, lines))
    else:
        click.echo(f"kvcoord: no recorder that was read holds anything about {operation}", err=True)
    sys.exit(Exit.OK if lines else Exit.FAILURE)


def _table(operation: str, lines: list[Line]) -> Table:
    table = Table(title=operation, title_justify="left", box=None, pad_edge=False)
    for column in ("seconds", "process", "event", ""):
        table.add_column(column, overflow="fold")
    for line in lines:
        bad = "ABORT" in line.text or "RETRACT" in line.text or "failed" in line.text
        table.add_row(f"{line.at_s:.6f}", line.process, line.kind, Text(line.text, "red" if bad else ""))
    return table
