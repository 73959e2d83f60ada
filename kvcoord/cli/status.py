"""`kvcoord status`: ask once, print once."""

import asyncio

import click
import msgspec
from rich.console import Console

from kvcoord.cli.address import default_address
from kvcoord.cli.options import ask_options, json_option
from kvcoord.cli.tables import show
from kvcoord.runtime.status import ask


@click.command()
@click.argument("address", required=False)
@ask_options
@json_option
def command(
    address: str | None, timeout_s: float, curve_keys_dir: str | None, insecure_tcp: bool, as_json: bool
) -> None:
    """Show the status of the coordinator or worker at ADDRESS: unix:///path, ipc:///path, tcp://host:port or http://host:port.

    Without ADDRESS: the newest running `kvcoord up`, or the coordinator at the default address.
    """
    address = address or default_address()
    snapshot = asyncio.run(ask(address, timeout_s, curve_keys_dir=curve_keys_dir, insecure_tcp=insecure_tcp))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
    else:
        Console().print(show(snapshot, address))
