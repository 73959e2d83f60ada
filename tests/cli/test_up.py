"""`kvcoord up`: everything that it starts serves, and ends with it, however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import END_TIMEOUT_S, call, end, environment, finished, joined, said, started

LAST_LINE = "`kvcoord status` and `kvcoord top` show what happens. ctrl-C ends everything.\n"
SMALL = ("--set", "host_pages=8", "--set", "device_pages=8", "--set", "log_level=warning", "--json")


def left_over(folder: Path) -> list[str]:
    home = folder / f"kvcoord-{os.getuid()}"
    return sorted(path.name for path in home.glob("*") if path.name != "dumps")


def test_everything_serves_until_ctrl_c_and_nothing_is_left(tmp_path: Path) -> None:
    with started(tmp_path, "up", "--ranks", "2", *SMALL) as up:
        card = said(up)
        assert len(card["workers"]) == 2
        status = joined(tmp_path)
        assert [(group["name"], group["world_size"]) for group in status["groups"]] == [("default", 2)]
        for rank, address in enumerate(card["workers"]):
            worker = json.loads(finished(tmp_path, "status", address, "--json").stdout)
            assert (worker["process"], worker["rank"]) == ("worker", rank)
            assert [pool["capacity"] for pool in worker["pools"]] == [8, 8]
        code, errors = end(up)
    assert code == 0
    assert "ended at once" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_dies_is_named_and_ends_all(tmp_path: Path) -> None:
    with started(tmp_path, "up", "--ranks", "2", *SMALL) as up:
        card = said(up)
        os.kill(_pid_of(up.pid, "--rank", "1"), signal.SIGKILL)
        _, errors = up.communicate(timeout=END_TIMEOUT_S)
    assert up.returncode == 1
    assert errors.splitlines()[-1] == "kvcoord: worker 1: ended with SIGKILL; all others are ended too"
    assert finished(tmp_path, "status", card["coordinator"]).returncode == 1
    assert left_over(tmp_path) == []


def test_children_end_when_it_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "up", "--ranks", "1", *SMALL) as up:
        said(up)
        # Standard error ends only when the children, its last holders, have ended.
        assert end(up, signal.SIGKILL)[0] == -signal.SIGKILL


def test_ctrl_c_while_it_starts_ends_everything(tmp_path: Path) -> None:
    with started(tmp_path, "up", "--ranks", "1", *SMALL, python=("-X", "importtime")) as up:
        assert up.stderr is not None
        while "kvcoord.runtime.children" not in up.stderr.readline():
            continue
        up.send_signal(signal.SIGINT)
        _, errors = up.communicate(timeout=END_TIMEOUT_S)
    assert "Traceback" not in errors
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "blame"),
    [
        (("--ranks", "4", "--tp", "3"), "tp x pp x cp"),
        (("--set", "host_pagse=4"), "unknown option"),
        (("--set", "listen=ipc:///x"), "is chosen by `kvcoord up`"),
        (("--set", "host_pages=-4"), "host_pages"),
        (("--dir", "/proc/nowhere"), "cannot be made"),
        (("--dir", "/tmp/" + "x" * 120), "bytes"),
    ],
)
def test_a_wrong_option_is_told_once_and_starts_nothing(tmp_path: Path, arguments: tuple[str, ...], blame: str) -> None:
    ended = call("up", *arguments, XDG_RUNTIME_DIR=str(tmp_path))
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    assert blame in ended.stderr
    assert left_over(tmp_path) == []


def test_a_folder_of_ones_own_is_used_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with started(tmp_path, "up", "--tp", "2", "--pp", "2", "--dir", str(folder), *SMALL) as up:
        card = said(up)
        assert card["workers"] == [f"ipc://{folder}/rank{rank}.sock" for rank in range(4)]
        worker = json.loads(finished(tmp_path, "status", card["workers"][3], "--json").stdout)
        assert worker["rank"] == 3
        assert end(up)[0] == 0
    assert list(folder.iterdir()) == []


def _pid_of(parent: int, *words: str) -> int:
    """The child of `parent` whose command line has these words one after the other."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    wanted = "\0".join(words) + "\0"
    return next(int(child) for child in children if wanted in Path(f"/proc/{child}/cmdline").read_text())


def test_the_lines_it_shows_can_be_pasted_into_python(tmp_path: Path) -> None:
    with started(tmp_path, "up", "--ranks", "1", "--set", "host_pages=8", "--set", "device_pages=8") as up:
        assert up.stdout is not None
        shown = "".join(iter(up.stdout.readline, LAST_LINE))
        snippet = shown.partition("Try it in Python:\n")[2]
        ran = subprocess.run(
            [sys.executable, "-c", snippet], capture_output=True, text=True, env=environment(tmp_path), check=False
        )
        assert ran.stdout == "connected to rank 0 of 1 - cached pages: 0\n", ran.stderr
        assert end(up)[0] == 0
