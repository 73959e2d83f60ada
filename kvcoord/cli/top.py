"""`kvcoord top`: the status, live."""

import asyncio
import sys

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from kvcoord.cli.address import default_address
from kvcoord.cli.options import ask_options, json_option
from kvcoord.cli.tables import show
from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.observability.snapshot import Snapshot
from kvcoord.runtime.process import Stop, run
from kvcoord.runtime.status import ask


@click.command()
@click.argument("address", required=False)
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="S")
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

    With --json: one object a line.
    """
    chosen = address or default_address()

    async def look() -> Snapshot:
        return await ask(chosen, timeout_s, curve_keys_dir=curve_keys_dir, insecure_tcp=insecure_tcp)

    async def main(stop: Stop) -> int:
        asked = asyncio.ensure_future(stop.wait())
        updates = 0
        with Screen(chosen, as_json) as screen:
            while count is None or updates < count:
                watching = asyncio.ensure_future(screen.update(look()))
                await asyncio.wait({asked, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not watching.done():
                    watching.cancel()
                    break
                watching.result()
                updates += 1
                if updates != count:
                    await asyncio.wait({asked}, timeout=interval_s)
                if asked.done():
                    break
        asked.cancel()
        return 0

    sys.exit(run(main, shutdown_timeout_s=timeout_s + 1.0))
