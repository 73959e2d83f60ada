"""Real `kvcoord` processes for tests: started in a folder of their own, spoken to by signals and pipes, ended.

What ends before it would serve is called in this process instead: that is faster.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kvcoord.cli import commands

REPOSITORY = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """This one, without options of kvcoord, with `folder` for run-time files."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVCOORD_")}
    return plain | {"PYTHONPATH": str(REPOSITORY), "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "160"} | variables


@contextmanager
def started(
    folder: Path, *arguments: str, python: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`kvcoord` with these arguments. Killed at the end of the block if it is still there."""
    process = subprocess.Popen(
        [sys.executable, *python, "-m", "kvcoord", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder, **(variables or {})),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of standard output, as JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(f"ended without a word: {process.communicate()[1]}")
    spoken: dict[str, Any] = json.loads(line)
    return spoken


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    """Send a signal; the exit code and standard error."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=END_TIMEOUT_S)
    return process.returncode, errors


def finished(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`kvcoord` with these arguments, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvcoord", *arguments],
        capture_output=True,
        text=True,
        env=environment(folder, **variables),
        timeout=END_TIMEOUT_S,
        check=False,
    )


def joined(folder: Path, *address: str) -> dict[str, Any]:
    """The status of a coordinator once a rank has joined there. A worker says that it serves before it has."""
    while True:
        asked = finished(folder, "status", *address, "--json")
        assert asked.returncode == 0, asked.stderr
        status: dict[str, Any] = json.loads(asked.stdout)
        if status["groups"]:
            return status


def call(*arguments: str, **variables: str) -> Result:
    """`kvcoord` with these arguments, in this process."""
    return CliRunner(env=variables).invoke(commands, arguments, prog_name="kvcoord")
