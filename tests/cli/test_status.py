"""`kvcoord status` and `kvcoord top`: what they show, of whom."""

import io
import json
import os
import signal
from pathlib import Path

import msgspec
from rich.console import Console

from kvcoord.cli.tables import show
from kvcoord.domain import Outcome, Reason, Tier
from kvcoord.domain import Path as DecisionPath
from kvcoord.observability.snapshot import (
    CoordinatorSnapshot,
    CopySnapshot,
    DecisionCount,
    GroupSnapshot,
    PoolSnapshot,
    RankSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from tests.cli.processes import end, finished, said, started

NOBODY = "No such file or directory; check that the process runs and that this is its address"


def rendered(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(show(snapshot, "ipc:///x"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


ABORTED = DecisionCount(path=DecisionPath.IMMEDIATE, outcome=Outcome.ABORT, reason=Reason.HOST_FULL, count=3)
COMMITTED = DecisionCount(path=DecisionPath.IMMEDIATE, outcome=Outcome.COMMIT, count=1234)

COORDINATOR = CoordinatorSnapshot(
    version="1",
    incarnation="a",
    uptime_s=3723.0,
    ready=True,
    ignored={"malformed": 7},
    joins_refused={"mismatch": 2},
    groups=[
        GroupSnapshot(
            name="prod",
            state="gathering",
            reason="waiting for ranks 1 of 2: rank 1 left",
            world_size=2,
            epoch=5,
            round=8181,
            ranks=[RankSnapshot(rank=0, state="waiting", last_heard_s=0.25), RankSnapshot(rank=1, state="missing")],
            free_pages={"host.kv": 77},
            decisions=[ABORTED, COMMITTED],
        )
    ],
)

WORKER = WorkerSnapshot(
    version="1",
    incarnation="a",
    uptime_s=75.0,
    ready=False,
    ready_reason="waiting for ranks 1",
    group="prod",
    rank=3,
    state="joining",
    coordinator="ipc:///c",
    pools=[PoolSnapshot(name="kv", tier=Tier.HOST, capacity=1000, free=700, reserved=1, used=297, quarantined=2)],
    copies=[CopySnapshot(direction="device_to_host", transfers=5, failed=1, pages=9, bytes=147456)],
    pages_requested=40,
    pages_hit={"device": 30, "host": 4},
)


def test_a_coordinator_is_shown_with_groups_ranks_rounds_and_what_is_wrong() -> None:
    shown = rendered(COORDINATOR)
    for part in (
        "coordinator at ipc:///x: ready, up 1 h 2 min",
        "gathering: waiting for ranks 1 of 2: rank 1 left",
        "8181",
        "1234",
        "3 (host_full 3)",
        "0.2 s ago",
        "never",
        "host.kv 77",
        "mismatch 2",
        "malformed 7",
    ):
        assert part in shown


def test_a_coordinator_that_nobody_has_joined_says_so() -> None:
    assert "no group has joined yet" in rendered(msgspec.structs.replace(COORDINATOR, groups=[]))


def test_a_worker_is_shown_with_pools_and_copies() -> None:
    shown = rendered(WORKER)
    for part in (
        "worker of rank 3 in group prod",
        "not ready: waiting for ranks 1",
        "up 1 min 15 s",
        "its coordinator: ipc:///c",
        "700",
        "297",
        "147,456",
        "pages looked up 40, hit: device 30, host 4",
    ):
        assert part in shown


def test_a_name_of_a_peer_is_text_whatever_it_holds() -> None:
    group = msgspec.structs.replace(COORDINATOR.groups[0], name="[red]x[/]\x1b[2J\n")
    assert "[red]x[/]?[2J?" in rendered(msgspec.structs.replace(COORDINATOR, groups=[group]))


def test_where_nobody_serves_the_failure_is_one_line(tmp_path: Path) -> None:
    asked = finished(tmp_path, "status", f"ipc://{tmp_path}/nobody.sock")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == f"kvcoord: ipc://{tmp_path}/nobody.sock: {NOBODY}\n"


def test_top_updates_until_it_is_ended(tmp_path: Path) -> None:
    with started(
        tmp_path, "coordinator", "--bind", f"ipc://{tmp_path}/c.sock", "--http", "none", "--print-ready"
    ) as it:
        said(it)
        twice = finished(tmp_path, "top", f"ipc://{tmp_path}/c.sock", "--count", "2", "--interval", "0.1", "--json")
        assert twice.returncode == 0
        assert [json.loads(line)["received"] for line in twice.stdout.splitlines()] == [
            {"StatusRequest": 1},
            {"StatusRequest": 2},
        ]
        with started(tmp_path, "top", f"ipc://{tmp_path}/c.sock", "--interval", "3600", "--json") as top:
            assert said(top)["ready"]
            assert end(top, signal.SIGINT) == (0, "")
        tables = finished(tmp_path, "top", f"ipc://{tmp_path}/c.sock", "--count", "1")
        assert "no group has joined yet" in tables.stdout


def test_top_goes_on_while_nobody_serves_and_tells_at_the_end(tmp_path: Path) -> None:
    top = finished(tmp_path, "top", f"ipc://{tmp_path}/nobody.sock", "--count", "2", "--interval", "0.1", "--json")
    assert top.returncode == 1
    assert len([json.loads(line)["error"] for line in top.stdout.splitlines()]) == 2


def test_asking_leaves_no_folder_behind(tmp_path: Path) -> None:
    assert finished(tmp_path, "status").returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_without_an_address_the_newest_running_up_is_asked(tmp_path: Path) -> None:
    home = tmp_path / f"kvcoord-{os.getuid()}"
    home.mkdir(mode=0o700)
    cards = [("old", os.getpid(), 1), ("new", os.getpid(), 2), ("dead", _dead_pid(tmp_path), 3)]
    for name, pid, at in cards:
        (home / f"up-{name}").mkdir()
        card = {"pid": pid, "started_at": at, "coordinator": f"ipc:///{name}", "http": "", "workers": []}
        (home / f"up-{name}" / "up.json").write_text(json.dumps(card))
    (home / "up-broken").mkdir()
    (home / "up-broken" / "up.json").write_text("{")
    assert finished(tmp_path, "status").stderr == f"kvcoord: ipc:///new: {NOBODY}\n"


def _dead_pid(folder: Path) -> int:
    with started(folder, "version") as process:
        process.communicate()
        return process.pid
