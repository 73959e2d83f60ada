"""`kvcoord replay` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROMISED: dict[str, object] = {
    "requests": 40,
    "pages_total": None,
    "pages_hit": None,
    "pages_hit_by_tier": None,
    "commits": None,
    "aborts": {},
    "covered": None,
    "voted": 0,
    "immediate": 0,
    "bytes_moved": None,
    "step_us_p50": None,
    "step_us_p99": None,
    "pages_leaked": 0,
    "digests_equal": True,
    "seconds": None,
}
"""What the JSON object has at least, and values that follow from the options."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcoord", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_json_is_exactly_one_object_with_all_that_is_promised() -> None:
    finished = run("--ranks", "2", "--requests", "40", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    report = json.loads(finished.stdout)
    assert finished.stdout.count("\n") == 1
    assert report.keys() >= PROMISED.keys()
    assert {name: report[name] for name, value in PROMISED.items() if value is not None} == {
        name: value for name, value in PROMISED.items() if value is not None
    }


def test_people_get_a_table() -> None:
    finished = run("--ranks", "1", "--requests", "20", "--device-pages", "300", "--host-pages", "300")
    assert finished.returncode == 0
    for row in ("requests", "pages hit on device", "pages leaked", "digests equal", "engine thread a step"):
        assert row in finished.stdout


def test_ranks_that_part_give_an_exit_code_and_the_place() -> None:
    options = ("--agreement", "none", "--slow-copy", "1=0.005", "--host-pages", "300,299", "--device-pages", "260")
    finished = run("--ranks", "2", "--requests", "60", "--json", *options)
    report = json.loads(finished.stdout)
    assert finished.returncode == 4
    assert not report["digests_equal"]
    assert report["divergence"]["sides"] == [[0], [1]]
    assert report["divergence"]["operation"]


@pytest.mark.parametrize("moment", ["*.yaml", "rank0.sock"], ids=["starting", "playing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_leaves_no_folder_behind(
    number: signal.Signals, moment: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvcoord", "replay", "--ranks", "1"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as run:
        while run.poll() is None and not list(tmp_path.glob(f"*/{moment}")):
            continue
        run.send_signal(number)
        _, errors = run.communicate()
    assert run.returncode == 130
    assert errors == f"kvcoord: stopped by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no/such/file"], "no/such/file"),
        (["--ranks", "2", "--host-pages", "9,9,9"], "host-pages"),
        (["--ranks", "3", "--tp", "2"], "world_size"),
        (["--device-pages", "many"], "--device-pages"),
        (["--slow-copy", "1"], "--slow-copy"),
        (["--slow-copy", "1=0.1", "--slow-copy", "1=0.2"], "slow-copy"),
        (["--agreement", "gloo", "--pp", "2"], "agreement"),
        (["--pools", "unlimited", "--device-pages", "4"], "pools"),
    ],
)
def test_wrong_options_end_with_code_2_and_a_line_that_names_them(arguments: list[str], named: str) -> None:
    finished = run(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert named in finished.stderr.splitlines()[-1]
