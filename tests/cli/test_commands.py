"""Commands that neither serve nor ask: in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcoord
from kvcoord.cli import COMMANDS
from kvcoord.load.trace import DEMO, read
from tests.cli.processes import REPOSITORY, call


def test_the_help_lists_every_command() -> None:
    shown = call("--help").stdout
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    shown = call(name, "--help")
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: kvcoord {name}")


def test_an_unknown_command_is_a_usage_error() -> None:
    ended = call("cordinator")
    assert ended.exit_code == 2
    assert "No such command 'cordinator'" in ended.stderr


def test_the_version_is_shown() -> None:
    assert call("version").stdout.startswith(f"kvcoord {kvcoord.__version__} ")
    assert json.loads(call("version", "--json").stdout)["version"] == kvcoord.__version__


def test_a_light_command_loads_no_sockets_no_tables_and_nothing_heavy() -> None:
    code = "import sys, atexit; from kvcoord.cli import main\natexit.register(lambda: print(*sys.modules)); main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "version"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = shown.stdout.splitlines()[-1].split()
    assert "kvcoord.cli.version" in loaded
    assert not set(loaded) & {"zmq", "uvloop", "asyncio", "rich", "torch", "numpy", "yaml", "prometheus_client"}


def test_the_resolved_configuration_names_the_source_of_every_value(tmp_path: Path) -> None:
    file = tmp_path / "kvcoord.yaml"
    file.write_text("group: {world_size: 4}\nworker: {host_pages: 100}\n")
    shown = call("config", "worker", "--file", str(file), "--set", "device_pages=50", KVCOORD_RANK="3")
    assert shown.exit_code == 0, shown.stderr
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert "rank: 3  # KVCOORD_RANK" in lines
    assert "device_pages: 50  # flag device_pages" in lines
    assert f"host_pages: 100  # {file}" in lines
    assert "tp: 4  # derived" in lines
    assert "log_level: info  # default" in lines


def test_the_resolved_configuration_as_json() -> None:
    shown = json.loads(call("config", "coordinator", "--set", "timeouts.vote_timeout_s=2", "--json").stdout)
    assert shown["config"]["timeouts"]["vote_timeout_s"] == 2
    assert shown["sources"] == {"timeouts.vote_timeout_s": "flag timeouts.vote_timeout_s"}


def test_every_option_is_explained() -> None:
    shown = call("config", "worker", "--explain").stdout
    assert "group.world_size: integer >= 0, default 0 [KVCOORD_GROUP__WORLD_SIZE]\n    Ranks in the group" in shown
    assert "rank: integer >= 0, required [KVCOORD_RANK]" in shown
    names = [option["name"] for option in json.loads(call("config", "--explain", "--json").stdout)]
    assert "limits.groups_max" in names


def test_a_generated_trace_is_the_one_of_its_seed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, ("5", "5", "6"), strict=True):
        options = ("--preset", "demo", "--requests", "40", "--seed", seed, "-o", str(path))
        assert call("trace", "generate", *options).exit_code == 0
    first, same, other = (path.read_bytes() for path in paths)
    assert first == same != other
    assert len(read(paths[0])) == 40


def test_a_trace_is_counted() -> None:
    counted = json.loads(call("trace", "stats", str(DEMO), "--json").stdout)
    assert counted["requests"] == len(read(DEMO))
    assert 0 < counted["pages_hit"] < counted["pages"]
    assert f"{counted['pages_hit']:,}" in call("trace", "stats", str(DEMO)).stdout
    assert json.loads(call("trace", "stats", str(DEMO), "--requests", "3", "--json").stdout)["requests"] == 3


def test_a_file_that_is_no_trace_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("hello\n")
    for path in (tmp_path / "trace", tmp_path / "absent"):
        ended = call("trace", "stats", str(path))
        assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
        assert str(path) in ended.stderr


def test_keys_are_made_once_and_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = json.loads(call("keys", "generate", str(folder), "--json").stdout)
    assert made["files"] == ["authorised_clients", "client.public", "client.secret", "server.public", "server.secret"]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (folder / "server.secret").stat().st_mode & 0o077 == 0
    again = call("keys", "generate", str(folder))
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
