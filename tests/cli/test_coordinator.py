"""`kvcoord coordinator` and `kvcoord worker` as processes."""

import json
import signal
from pathlib import Path

import pytest

from tests.cli.processes import call, end, finished, joined, said, started


def serving(folder: Path, scheme: str = "unix") -> tuple[str, ...]:
    return ("coordinator", "--bind", f"{scheme}://{folder}/c.sock", "--http", "127.0.0.1:0", "--print-ready")


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
def test_it_says_when_it_serves_and_answers_at_once_on_every_port(scheme: str, tmp_path: Path) -> None:
    with started(tmp_path, *serving(tmp_path, scheme)) as process:
        ready = said(process)
        assert ready["addresses"] == [f"{scheme}://{tmp_path}/c.sock"]
        for address in (*ready["addresses"], f"http://{ready['http']}"):
            asked = finished(tmp_path, "status", address, "--json")
            assert asked.returncode == 0, asked.stderr
            status = json.loads(asked.stdout)
            assert (status["process"], status["ready"], status["groups"]) == ("coordinator", True, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order_and_takes_its_socket_away(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, *serving(tmp_path)) as process:
        said(process)
        code, errors = end(process, number)
    assert code == 0
    assert "Traceback" not in errors
    assert not (tmp_path / "c.sock").exists()


def test_a_second_one_at_the_same_address_is_a_usage_error_in_one_line(tmp_path: Path) -> None:
    with started(tmp_path, *serving(tmp_path)) as process:
        said(process)
        second = finished(tmp_path, *serving(tmp_path))
        assert second.returncode == 2
        assert second.stderr.count("\n") == 1
        assert f"unix://{tmp_path}/c.sock" in second.stderr
        assert "already in use" in second.stderr
        assert finished(tmp_path, "status", f"unix://{tmp_path}/c.sock").returncode == 0


def test_a_killed_one_is_followed_by_the_next_at_the_same_address(tmp_path: Path) -> None:
    with started(tmp_path, *serving(tmp_path)) as process:
        said(process)
        end(process, signal.SIGKILL)
    with started(tmp_path, *serving(tmp_path)) as process:
        said(process)


def test_it_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    with started(tmp_path, *serving(tmp_path), python=("-X", "importtime")) as process:
        ready = said(process)
        finished(tmp_path, "status", f"http://{ready['http']}")
        _, errors = end(process)
    loaded = {line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time")}
    assert "kvcoord.runtime.coordinator" in loaded
    assert not loaded & {"torch", "numpy", "rich"}


@pytest.mark.parametrize(
    ("content", "blame"),
    [
        ("coordinator: {bnd: [x]}", "did you mean bind"),
        ("coordinator:\n  bind: [", "is not valid"),
        ("timeouts: {vote_timeout_s: soon}", "timeouts.vote_timeout_s"),
        ("coordinator: {bind: ['tcp://127.0.0.1:1']}", "tcp needs keys"),
    ],
)
def test_a_bad_file_is_a_usage_error_that_names_the_option(tmp_path: Path, content: str, blame: str) -> None:
    file = tmp_path / "kvcoord.yaml"
    file.write_text(content)
    ended = call("coordinator", "--config", str(file))
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    assert blame in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "blame"),
    [
        (("--config", "/nowhere/kvcoord.yaml"), "cannot be read"),
        (("--set", "vote_timeout_s"), "NAME=VALUE"),
        (("--set", "a=1", "--set", "a=2"), "set twice"),
        (("--set", "vote_timeout_s=1"), "did you mean timeouts.vote_timeout_s"),
        (("--bind", "ipc://relative"), "absolute path"),
        (("--http", "0.0.0.0:80"), "loopback"),
        (("--no-such-flag",), "No such option"),
    ],
)
def test_a_wrong_option_is_a_usage_error(arguments: tuple[str, ...], blame: str) -> None:
    ended = call("coordinator", *arguments)
    assert ended.exit_code == 2
    assert blame in ended.stderr


def test_an_address_that_cannot_be_served_is_a_usage_error_in_one_line(tmp_path: Path) -> None:
    ended = finished(tmp_path, "coordinator", "--bind", "ipc:///nowhere/at/all.sock", "--http", "none")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "directory /nowhere/at does not exist" in ended.stderr


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvcoord.yaml"
    file.write_text(f"coordinator: {{http: null, bind: ['ipc://{tmp_path}/file.sock']}}\nlog_level: error\n")
    variables = {"KVCOORD_BIND": f"ipc://{tmp_path}/variable.sock", "KVCOORD_HTTP": "127.0.0.1:0"}
    arguments = ("coordinator", "--config", str(file), "--http", "none", "--print-ready")
    with started(tmp_path, *arguments, variables=variables) as process:
        ready = said(process)
        assert end(process) == (0, "")
    assert ready == {"ready": True, "addresses": [f"ipc://{tmp_path}/variable.sock"], "http": ""}


def test_a_worker_that_the_group_does_not_want_ends_with_code_3_and_says_why(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/c.sock"
    shared = ("--http", "none", "--set", f"coordinators={address}", "--set", f"listen=ipc://{tmp_path}/{{rank}}.sock")
    shape = ("--set", "group.world_size=2", "--set", "host_pages=4", "--set", "device_pages=4")
    with (
        started(tmp_path, *serving(tmp_path)) as coordinator,
        started(tmp_path, "worker", "--rank", "0", *shared, *shape, "--print-ready") as first,
    ):
        said(coordinator)
        said(first)
        joined(tmp_path, address)
        refused = finished(tmp_path, "worker", "--rank", "1", *shared, *shape, "--set", "group.page_tokens=32")
        assert refused.returncode == 3
        assert "page_tokens is 32 on rank 1 and 64 on rank 0" in refused.stderr.splitlines()[-1]
        code, errors = end(first)
    assert code == 0, errors
