"""The configuration that a command line gives. Knows no command."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvcoord.config import Loaded, load
from kvcoord.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)


def load_config(
    config_type: type[Config], file: Path | None, assignments: Sequence[str], flags: Mapping[str, object]
) -> Loaded[Config]:
    """The configuration of one process: flag before environment before file before default.

    A flag of its own goes before `--set`. Raises ConfigError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    return load(config_type, file=file, environment=os.environ, flags=assigned(assignments) | given)


def assigned(assignments: Sequence[str]) -> dict[str, object]:
    """`--set` values by option name. Raises ConfigError for one that is not NAME=VALUE or is set twice."""
    values: dict[str, object] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign or not name:
            raise ConfigError("--set", assignment, "write it as NAME=VALUE, for example timeouts.vote_timeout_s=2")
        if name in values:
            raise ConfigError("--set", assignment, f"{name} is set twice: leave one out")
        values[name] = value
    return values


def nullable(text: str | None) -> str | None:
    """`none` on the command line is null in the configuration; None: not given."""
    return "null" if text == "none" else text
