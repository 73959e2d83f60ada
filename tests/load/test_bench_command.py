"""`kvcoord bench` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcoord", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_json_is_a_list_of_rows_and_the_report_is_written_beside_it(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    finished = run("index", "--quick", "--json", "--html", str(report))
    assert finished.returncode == 0
    rows = json.loads(finished.stdout)
    assert {"case", "pages", "p50_us", "p99_us"} <= set(rows[0])
    assert report.read_text().startswith("<!doctype html>")


def test_people_get_a_table_with_what_it_ran_on() -> None:
    finished = run("local", "--quick")
    assert finished.returncode == 0
    assert "match of a page" in finished.stdout
    assert "cores" in finished.stdout


def test_rows_of_agreement_have_the_promised_fields() -> None:
    finished = run("agreement", "--ranks", "2", "--quick", "--no-sidecar", "--json")
    assert finished.returncode == 0, finished.stderr
    promised = ["case", "ranks", "p50_us", "p99_us", "peer", "peer_p50_us", "peer_p99_us"]
    for row in json.loads(finished.stdout):
        assert {*promised, "ratio_p50", "ratio_p99", "budget", "met"} <= set(row)
        assert row["ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "nothing"),
        (["agreement", "--ranks", "many"], "ranks"),
        (["agreement", "--ranks", "1"], "ranks"),
        (["index", "--sglang-python", "/usr/bin/python3"], "sglang"),
        (["index", "--quick", "--html", "/no/such/folder/report.html"], "html"),
    ],
)
def test_wrong_options_end_with_code_2_and_a_line_that_names_them(arguments: list[str], named: str) -> None:
    finished = run(*arguments)
    assert finished.returncode == 2
    assert named in finished.stderr.splitlines()[-1]
