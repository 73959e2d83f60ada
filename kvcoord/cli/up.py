"""`kvcoord up`: a coordinator and one worker per rank on this machine, for whoever wants to try the client."""

import asyncio
import os
import sys
import time
from pathlib import Path

import click
import msgspec

from kvcoord.cli.address import CARD, Card
from kvcoord.cli.configuration import assigned, load_config
from kvcoord.cli.options import config_option, json_option, set_option
from kvcoord.config import CoordinatorConfig, WorkerConfig, explain
from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.runtime.children import Children, ending
from kvcoord.runtime.directory import make_private_folder, remove_private_folder
from kvcoord.runtime.process import Ready, Stop, run

_SNIPPET = """\
import asyncio
import kvcoord

async def main():
    async with kvcoord.connect("{address}") as cache:
        hit = await cache.match([bytes(16)])
        print("connected to rank", cache.info.rank, "of", cache.info.world_size, "- cached pages:", hit.pages)

asyncio.run(main())
"""


class Plan(msgspec.Struct, frozen=True):
    """What to start: arguments of `kvcoord` by the name of the child."""

    coordinator: dict[str, list[str]]
    workers: dict[str, list[str]]
    end_timeout_s: float


@click.command()
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="World size of the group, tp x pp.")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), metavar="N", help="Pipeline stages.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the sockets; else a fresh one."
)
@config_option
@set_option
@json_option
def command(
    ranks: int | None,
    tp: int | None,
    pp: int | None,
    folder: Path | None,
    file: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a coordinator and a worker per rank until ctrl-C, and show how to connect to them."""
    shape = {"group.world_size": ranks, "group.tp": tp, "group.pp": pp}
    given = {name: str(number) for name, number in shape.items() if number is not None}
    fresh = folder is None
    folder = _make_folder(folder)
    try:
        plan = _plan(folder, file, assignments, given)
        code = run(lambda stop: _main(stop, plan, folder, as_json), shutdown_timeout_s=2 * plan.end_timeout_s + 1)
    finally:
        if fresh:
            remove_private_folder(folder)
    sys.exit(code)


async def _main(stop: Stop, plan: Plan, folder: Path, as_json: bool) -> int:
    async with Children(plan.end_timeout_s) as children:
        asked = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(_start(children, plan))
        try:
            await asyncio.wait({asked, starting}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return 0
            card = _write_card(folder, *starting.result())
            _announce(card, as_json)
            ended = asyncio.ensure_future(children.wait_ended())
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                ended.cancel()
                return 0
            lost = ended.result()
            raise PeerUnavailable(lost.name, f"ended with {ending(await lost.wait())}; all others are ended too")
        finally:
            asked.cancel()
            starting.cancel()
            (folder / CARD).unlink(missing_ok=True)


async def _start(children: Children, plan: Plan) -> tuple[Ready, list[Ready]]:
    [coordinator] = await children.serve(plan.coordinator, generation=0)
    return coordinator, await children.serve(plan.workers, generation=1)


def _plan(folder: Path, file: Path | None, assignments: tuple[str, ...], shape: dict[str, str]) -> Plan:
    """The arguments of every child; checked here, so that a mistake is told once and not by each of them."""
    shared, worker = _split(assigned(assignments))
    coordinator_address = f"unix://{folder}/coordinator.sock"
    worker |= shape | {"listen": f"ipc://{folder}/rank{{rank}}.sock", "coordinators": coordinator_address}
    ports = ["--http", "127.0.0.1:0"]
    source = [] if file is None else ["--config", str(file)]
    first = load_config(WorkerConfig, file, _sets(worker), {"rank": 0}).config
    coordinator = load_config(CoordinatorConfig, file, _sets(shared), {"bind": [coordinator_address]}).config
    timeout_s = max(first.timeouts.shutdown_timeout_s, coordinator.timeouts.shutdown_timeout_s)
    return Plan(
        {"coordinator": ["coordinator", *source, "--bind", coordinator_address, *ports, *_set_options(shared)]},
        {
            f"worker {rank}": ["worker", *source, "--rank", str(rank), *ports, *_set_options(worker)]
            for rank in range(first.group.world_size)
        },
        timeout_s + 1,
    )


def _split(values: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """`--set` values for the coordinator and for the workers: each gets those that it knows."""
    known = [{option.name for option in explain(kind)} for kind in (CoordinatorConfig, WorkerConfig)]
    for name, value in values.items():
        if name not in known[0] | known[1]:
            raise ConfigError(name, value, "unknown option; `kvcoord config --explain` lists all", "--set")
        if name in ("bind", "http", "listen", "coordinators", "rank", "group.world_size", "group.tp", "group.pp"):
            raise ConfigError(name, value, "is chosen by `kvcoord up`: use --dir, --ranks, --tp and --pp", "--set")
    coordinator, worker = ({name: value for name, value in values.items() if name in names} for names in known)
    return coordinator, worker


def _sets(values: dict[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def _set_options(values: dict[str, object]) -> list[str]:
    return [word for value in _sets(values) for word in ("--set", value)]


def _make_folder(folder: Path | None) -> Path:
    if folder is None:
        return make_private_folder("up-")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("--dir", str(folder), f"cannot be made: {error.strerror}") from error
    return folder.resolve()


def _write_card(folder: Path, coordinator: Ready, workers: list[Ready]) -> Card:
    addresses = [address for worker in workers for address in worker.addresses]
    card = Card(
        pid=os.getpid(),
        started_at=time.time_ns(),
        coordinator=coordinator.addresses[0],
        http=coordinator.http,
        workers=addresses,
        worker_http=[worker.http for worker in workers],
    )
    (folder / CARD).write_bytes(msgspec.json.encode(card))
    return card


def _announce(card: Card, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(card).decode())
        return
    click.echo(f"coordinator  {card.coordinator}  http://{card.http}")
    for rank, address in enumerate(card.workers):
        click.echo(f"rank {rank:<7} {address}")
    click.echo(f"\nTry it in Python:\n\n{_SNIPPET.format(address=card.workers[0])}")
    click.echo("`kvcoord status` and `kvcoord top` show what happens. ctrl-C ends everything.")
