"""`kvcoord diff`: the first event at which two ranks part, found in their flight recorders."""

import sys

import click
import msgspec

from kvcoord.cli.options import json_option
from kvcoord.cli.recorders import dumps_of
from kvcoord.errors import UsageError
from kvcoord.observability.recorder import Dump
from kvcoord.observability.story import Parting, part
from kvcoord.runtime.exits import Exit


@click.command()
@click.argument("first")
@click.argument("second")
@json_option
def command(first: str, second: str, as_json: bool) -> None:
    """Find the first event that two ranks did not apply alike.

    FIRST and SECOND are dumps of two ranks' flight recorders, or HTTP addresses of their running workers. Ends with
    exit code 4 when they part, and 0 when what both still hold is the same.
    """
    one, other = _only(first), _only(second)
    parting = part(one, other)
    if parting is None:
        fix = "holds no event that the other one has too: write both out at about the same time"
        raise UsageError("recorders", f"{first} {second}", fix)
    if as_json:
        processes = [one.header.process, other.header.process]
        click.echo(msgspec.json.encode({"processes": processes, **msgspec.to_builtins(parting)}).decode())
    else:
        click.echo(_tell(parting, one, other))
    sys.exit(Exit.LOST if parting.parted else Exit.OK)


def _only(source: str) -> Dump:
    dumps = dumps_of([source])
    if len(dumps) != 1:
        raise UsageError("recorders", source, "name one dump of one rank, not a folder")
    return dumps[0]


def _tell(parting: Parting, one: Dump, other: Dump) -> str:
    names = [one.header.process, other.header.process]
    same = f"{parting.common} events are the same on both, the last is: {parting.last_common}"
    if not parting.parted:
        ahead = [name for name, event in zip(names, (parting.first, parting.second), strict=True) if event is not None]
        return f"{same}\n" + (f"{ahead[0]} has gone on, the other has not yet" if ahead else "they do not part")
    return f"{same}\nthen they part:\n  {names[0]:<12} {parting.first}\n  {names[1]:<12} {parting.second}"
