"""Options that several commands have, and the configuration that they give. Knows no command."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import click
import msgspec

from kvcoord.config import Loaded, load
from kvcoord.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
Config = TypeVar("Config", bound=msgspec.Struct)

STANDARD_OUTPUT = 1

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

config_option = click.option(
    "--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="YAML or TOML file with options."
)

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set any option by its dotted name, for example timeouts.vote_timeout_s=2. May be repeated.",
)


class ProcessOptions(msgspec.Struct, frozen=True):
    """How a process is started and watched by another."""

    ready_fd: int | None
    exit_with_parent: bool


def process_options(function: Callable[P, R]) -> Callable[P, R]:
    """Options of commands that serve; they arrive as one argument `process`."""

    @click.option("--print-ready", is_flag=True, help="Print one line of JSON once it serves.")
    @click.option("--ready-fd", type=click.IntRange(0), metavar="N", help="Write that line to this file descriptor.")
    @click.option("--exit-with-parent", is_flag=True, help="End when the process that started it ends.")
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        print_ready, ready_fd = kwargs.pop("print_ready"), kwargs.pop("ready_fd")
        assert ready_fd is None or isinstance(ready_fd, int)
        if ready_fd is None and print_ready:
            ready_fd = STANDARD_OUTPUT
        kwargs["process"] = ProcessOptions(ready_fd, bool(kwargs.pop("exit_with_parent")))
        return function(*args, **kwargs)

    return wrapped


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


def ask_options(function: Callable[P, R]) -> Callable[P, R]:
    """Options of commands that ask another process: `timeout_s`, `curve_keys_dir`, `insecure_tcp`."""
    for option in (
        click.option("--insecure-tcp", is_flag=True, help="Ask over tcp without keys."),
        click.option("--curve-keys-dir", metavar="DIR", help="Folder with the client keys to ask over tcp with."),
        click.option(
            "--timeout", "timeout_s", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, metavar="SECONDS"
        ),
    ):
        function = option(function)
    return function
