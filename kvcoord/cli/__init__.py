"""The command line. Each command is a module of this folder with a `command`, imported when it is asked for.

A command ends with one of the exit codes of `runtime.exits`; an error of this package is one line on standard error.
"""

import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import click

from kvcoord.errors import KvcoordError
from kvcoord.runtime.exits import report

COMMANDS: Final = {
    "coordinator": "Serve groups of ranks: tally votes, decide, notice who is missing.",
    "worker": "Serve the engine of one rank: host memory, index, copies, votes.",
    "up": "Run a coordinator and a worker per rank, to try the client.",
    "status": "Show groups, ranks, rounds and pools of a coordinator or a worker.",
    "top": "Watch the status live.",
    "explain": "Tell one operation's life on all ranks, from their flight recorders.",
    "diff": "Find the first event at which two ranks part.",
    "replay": "Play a request trace through real processes, and check every page.",
    "simulate": "Run the machines in simulated time under seeded faults, and check every promise.",
    "bench": "Measure what kvcoord costs, each part beside its peer.",
    "chaos": "Replay a trace while processes are killed, stopped and cut off at random.",
    "config": "Show the resolved configuration, with the source of every value.",
    "trace": "Make and measure request traces.",
    "keys": "Make the keys that links over TCP need.",
    "version": "Show the version.",
}


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C comes after the block. Within an import the interpreter may drop it: locks of modules are let go in
    callbacks, and what is raised there is printed and forgotten.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _LazyCommands(click.Group):
    """Knows the commands by name; their modules are imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if find_spec(f"{__name__}.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        with _signals_held():
            command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvcoordError as error:
            sys.exit(report(error))


@click.group(cls=_LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def commands() -> None:
    """Keeps the KV caches of a multi-GPU model server equal on every rank."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. `arguments` None: those of the process. Ends by SystemExit with the exit code."""
    commands.main(args=arguments, prog_name="kvcoord")
