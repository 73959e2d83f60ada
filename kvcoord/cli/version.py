"""`kvcoord version`."""

import click
import msgspec

import kvcoord
from kvcoord.cli.options import json_option
from kvcoord.protocol.local import LOCAL_VERSION
from kvcoord.protocol.messages import PROTOCOL_VERSION


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the version of kvcoord and of the protocols that it speaks."""
    if as_json:
        versions = {"version": kvcoord.__version__, "protocol": PROTOCOL_VERSION, "local_protocol": LOCAL_VERSION}
        click.echo(msgspec.json.encode(versions).decode())
    else:
        click.echo(f"kvcoord {kvcoord.__version__} (protocol {PROTOCOL_VERSION}, local protocol {LOCAL_VERSION})")
