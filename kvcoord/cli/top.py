"""`kvcoord top`: the status, live."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvcoord.cli.address import default_address
from kvcoord.cli.options import ask_options, json_option
from kvcoord.cli.tables import show
from kvcoord.errors import DeadlineExceeded, KvcoordError, PeerUnavailable
from kvcoord.observability.snapshot import Snapshot
from kvcoord.runtime.exits import Exit
from kvcoord.runtime.process import Stop, run
from kvcoord.runtime.status import ask

_END_TIMEOUT_S = 2.0

Update = Callable[[Snapshot | KvcoordError], None]
"""Shows a status, or why there is none."""


@click.command()
@click.argument("address", required=False)
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS"
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N updates.")
@ask_options
@json_option
def command(
    address: str | None,
    interval_s: float,
    count: int | None,
    timeout_s: float,
    curve_keys_dir: str | None,
    insecure_tcp: bool,
    as_json: bool,
) -> None:
    """Watch the status of the coordinator or worker at ADDRESS, as in `kvcoord status`, until ctrl-C.

    One that is away is asked again. With --json: one object a line.
    """
    chosen = address or default_address()

    async def look() -> Snapshot | KvcoordError:
        try:
            return await ask(chosen, timeout_s, curve_keys_dir=curve_keys_dir, insecure_tcp=insecure_tcp)
        except (PeerUnavailable, DeadlineExceeded) as error:
            return error

    async def main(stop: Stop) -> int:
        with _json_lines() if as_json else _screen(chosen) as update:
            return await _watch(look, update, stop, interval_s, count)

    sys.exit(run(main, shutdown_timeout_s=_END_TIMEOUT_S))


async def _watch(
    look: Callable[[], Awaitable[Snapshot | KvcoordError]],
    update: Update,
    stop: Stop,
    interval_s: float,
    count: int | None,
) -> int:
    """Look and update until asked to stop, or `count` times. Fails when the last look did."""
    asked = asyncio.ensure_future(stop.wait())
    code = Exit.OK
    updates = 0
    while not asked.done() and updates != count:
        looking = asyncio.ensure_future(look())
        await asyncio.wait({asked, looking}, return_when=asyncio.FIRST_COMPLETED)
        if not looking.done():
            looking.cancel()
            break
        seen = looking.result()
        code = Exit.FAILURE if isinstance(seen, KvcoordError) else Exit.OK
        update(seen)
        updates += 1
        if updates != count:
            await asyncio.wait({asked}, timeout=interval_s)
    if asked.done():
        return Exit.OK
    asked.cancel()
    return code


@contextmanager
def _screen(address: str) -> Iterator[Update]:
    """The whole terminal; where there is none, one table below the other."""
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:

        def update(seen: Snapshot | KvcoordError) -> None:
            shown = Text(str(seen), "red") if isinstance(seen, KvcoordError) else show(seen, address)
            if console.is_terminal:
                live.update(Group(shown, Text("ctrl-C ends", "dim")), refresh=True)
            else:
                console.print(shown)

        yield update


@contextmanager
def _json_lines() -> Iterator[Update]:
    def update(seen: Snapshot | KvcoordError) -> None:
        shown: object = {"error": str(seen)} if isinstance(seen, KvcoordError) else seen
        click.echo(msgspec.json.encode(shown).decode())

    yield update
