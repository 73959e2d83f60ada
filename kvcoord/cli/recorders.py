"""Where `kvcoord explain` and `kvcoord diff` find flight recorders: files, folders of files, processes that run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvcoord.cli.address import newest_card
from kvcoord.errors import DeadlineExceeded, UsageError
from kvcoord.observability.recorder import Dump, load, parse
from kvcoord.runtime.dumps import dumps_directory
from kvcoord.runtime.status import get

TIMEOUT_S: Final = 10.0

EVENTS_ROUTE: Final = "/events"


def dumps_of(sources: Sequence[str]) -> list[Dump]:
    """What all these hold. A source is a dump's file, a folder of them, or the HTTP address of a process.

    Without sources: the processes of the newest `kvcoord up` that is running, and the folder that dumps go to when no
    other is configured. Raises UsageError for a file that is no dump, PeerUnavailable and DeadlineExceeded.
    """
    return [dump for source in sources or _default_sources() for dump in _read(source)]


def _default_sources() -> list[str]:
    card = newest_card()
    running = [] if card is None else [f"http://{address}" for address in (card.http, *card.worker_http) if address]
    folder = dumps_directory()
    return [*running, str(folder)] if folder.is_dir() or not running else running


def _read(source: str) -> list[Dump]:
    if source.startswith("http://"):
        return [parse(asyncio.run(_ask(source)), source)]
    path = Path(source)
    if not path.is_dir():
        return [load(path)]
    found = sorted(path.glob("*.jsonl"))
    if not found:
        fix = "holds no dumps (*.jsonl): send a process SIGUSR1, or name its HTTP address"
        raise UsageError("path", source, fix)
    return [load(file) for file in found]


async def _ask(address: str) -> bytes:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await get(address, EVENTS_ROUTE)
    except TimeoutError as error:
        raise DeadlineExceeded(f"events from {address}", "timeout", TIMEOUT_S) from error
