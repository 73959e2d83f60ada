"""Options that several commands have. Knows no command and no configuration."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click
import msgspec

P = ParamSpec("P")
R = TypeVar("R")

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
