"""Which process a command asks when none is named: the newest `kvcoord up` of this user, or the default coordinator."""

import os
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config.process import COORDINATOR_ADDRESS
from kvcoord.runtime.directory import private_entries

CARD: Final = "up.json"
"""File in the folder of a running `kvcoord up` that says what it runs."""


class Card(msgspec.Struct, frozen=True):
    """What one `kvcoord up` runs. `started_at` orders several of them: nanoseconds since the epoch."""

    pid: int
    started_at: int
    coordinator: str
    http: str
    workers: list[str]
    worker_http: list[str] = []


def default_address() -> str:
    """The coordinator of the newest `kvcoord up` that is running, else the default address of coordinators."""
    newest = newest_card()
    return COORDINATOR_ADDRESS if newest is None else newest.coordinator


def newest_card() -> Card | None:
    """What the newest `kvcoord up` of this user runs, None when none is running."""
    cards = [card for card in map(_read, _folders()) if card is not None and _runs(card.pid)]
    return max(cards, key=lambda card: card.started_at, default=None)


def _folders() -> list[Path]:
    return [path for path in private_entries() if path.name.startswith("up-")]


def _read(folder: Path) -> Card | None:
    try:
        return msgspec.json.decode((folder / CARD).read_bytes(), type=Card)
    except (OSError, msgspec.DecodeError):
        return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
