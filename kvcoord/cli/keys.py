"""`kvcoord keys`: what links over TCP need to know who is who."""

from pathlib import Path

import click
import msgspec

from kvcoord.cli.options import json_option
from kvcoord.transport.curve import generate_keys


@click.group()
def command() -> None:
    """Make the keys that links over TCP need."""


@command.command()
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
def generate(directory: Path, as_json: bool) -> None:
    """Write a key pair for coordinators and one for the ranks they let in to DIRECTORY. Never replaces a key."""
    generate_keys(directory)
    files = sorted(path.name for path in directory.iterdir())
    if as_json:
        click.echo(msgspec.json.encode({"directory": str(directory), "files": files}).decode())
        return
    click.echo(f"keys written to {directory}: {', '.join(files)}")
    click.echo("coordinator: server.secret, server.public, authorised_clients")
    click.echo("workers:     client.secret, client.public, server.public")
    click.echo(f"then set curve_keys_dir to {directory} on both sides; secrets are readable by this user only")
