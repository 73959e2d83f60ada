"""Flight recorders of real processes: written out when something breaks or when asked, and explained."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcoord.errors import Diverged, GroupLost
from kvcoord.index.keys import block_page_keys
from kvcoord.observability.recorder import Dump, load
from tests.runtime.engine import KEYS, on_all
from tests.runtime.process_group import ProcessGroup
from tests.runtime.test_failures_worker import advance_for_ever, engines, store_and_read_back


def kvcoord(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user runs it. The group's processes go on meanwhile."""
    command = [sys.executable, "-m", "kvcoord", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def events(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert finished.returncode == 0, finished.stderr
    found: list[dict[str, Any]] = json.loads(finished.stdout)["events"]
    return found


def dumps(folder: Path) -> dict[str, Dump]:
    found = [load(path) for path in sorted(folder.glob("*.jsonl"))]
    return {dump.header.process: dump for dump in found}


async def dumped(group: ProcessGroup) -> None:
    """Every process has been asked for its recorder, and has written it, once it was done with what it was doing."""
    await on_all(*(group.status(rank) for rank in range(group.group.world_size)))
    for child in group.running.values():
        child.signal(signal.SIGUSR1)
    await written(group, len(group.running))


async def written(group: ProcessGroup, count: int) -> dict[str, Dump]:
    """The dumps, once there are so many."""
    while len(dumps(group.folder)) < count:
        await group.status(0)
    return dumps(group.folder)


def rank_files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("rank*.jsonl"))]


async def test_an_operation_is_explained_on_all_ranks_from_dumps_and_two_equal_ranks_do_not_part(
    tmp_path: Path,
) -> None:
    async with ProcessGroup(tmp_path, 2).limit(vote_timeout_s=2.0) as group, engines(group) as made:
        await store_and_read_back(made)
        group.stop("r1")
        await made[0].cache.agree("own/1", True)
        group.carry_on("r1")
        await made[1].cache.agree("own/1", True)
        await dumped(group)
    told = events(kvcoord("explain", "own/1", str(tmp_path), "--json"))
    assert {event["process"] for event in told} == {"coordinator", "rank0", "rank1"}
    assert told[0]["process"] == "rank0"
    assert told[0]["text"] == "votes yes"
    decided = next(event for event in told if event["process"] == "coordinator" and "ABORT" in event["text"])
    assert "vote_timeout: rank 1 (limit: timeouts.vote_timeout_s" in decided["text"]
    assert [event["at_s"] for event in told] == sorted(event["at_s"] for event in told)
    write = events(kvcoord("explain", "write-through/2/0", str(tmp_path), "--json"))
    assert {"copy_started", "copy_ended", "applied", "frame", "verdict"} <= {event["kind"] for event in write}
    assert "complete write-through/2/0" in kvcoord("explain", "write-through/2/0", str(tmp_path)).stdout
    same = kvcoord("diff", *rank_files(tmp_path))
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "they do not part")


async def test_processes_that_run_are_asked_over_http(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 1) as group:
        await group.kill("r0")
        await group.worker(0, http="127.0.0.1:0")
        async with engines(group) as made:
            await store_and_read_back(made)
            told = events(kvcoord("explain", "load-back/3/0", f"http://{group.ready['r0'].http}", "--json"))
            assert {event["process"] for event in told} == {"rank0"}
    gone = kvcoord("explain", "load-back/3/0", f"http://{group.ready['r0'].http}")
    assert gone.returncode == 1
    assert len(gone.stderr.splitlines()) == 1


async def test_ranks_that_diverge_write_out_their_recorders_and_diff_finds_the_first_difference(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2, agreement="none") as group, engines(group) as (a, b):
        await on_all(a.store(KEYS, b"x"), b.store(block_page_keys([7, 8]), b"x"))
        stepping = [asyncio.ensure_future(advance_for_ever(engine)) for engine in (a, b)]
        for steps in stepping:
            with pytest.raises(Diverged):
                await steps
        found = await written(group, 3)
    assert found.keys() == {"coordinator", "rank0", "rank1"}
    assert "Diverged" in found["rank0"].header.cause
    parted = kvcoord("diff", *rank_files(tmp_path), "--json")
    assert parted.returncode == 4
    shown = json.loads(parted.stdout)
    assert shown["first"] != shown["second"]
    assert shown["processes"] == ["rank0", "rank1"]


async def test_a_lost_group_leaves_the_recorder_of_who_waited(tmp_path: Path) -> None:
    async with ProcessGroup(tmp_path, 2).limit(group_deadline_s=0.3) as group, engines(group) as (a, _):
        await group.kill("r1")
        with pytest.raises(GroupLost):
            await advance_for_ever(a)
        [dump] = [dump for dump in dumps(tmp_path).values() if dump.header.process == "rank0"]
    assert "GroupLost" in dump.header.cause
    assert {"frame", "suspended", "failed"} <= {entry.kind for entry in dump.entries}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["explain", "w/1", "no/such/file"], "no/such/file"),
        (["explain", "w/1", "."], "holds no dumps"),
        (["diff", "no/such/file", "other"], "no/such/file"),
    ],
)
def test_what_is_no_recorder_ends_with_code_2_and_its_name(arguments: list[str], named: str) -> None:
    finished = kvcoord(*arguments)
    assert finished.returncode == 2
    assert named in finished.stderr
