"""The coordinator is a process of its own and dies in the middle of a stream."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.sglang.engine import Engine, Groups
from tests.sglang.stream import Faults, Report, Stream
from tests.sglang.world import PATIENCE, run_ranks, values

STEPS = 600


@contextmanager
def coordinator(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A coordinator process that serves at this address."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvcoord", "coordinator", "--bind", address, "--ready-fd", str(writing)]
    environment = os.environ | PATIENCE
    process = subprocess.Popen([*command, "--http", "127.0.0.1:0"], pass_fds=[writing], env=environment)
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            assert json.loads(ready.readline())["ready"]
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def restarting(process: "subprocess.Popen[bytes]", address: str) -> Iterator[None]:
    """Starts another coordinator at the same address as soon as this one has ended."""
    done = threading.Event()

    def watch() -> None:
        process.wait()
        with coordinator(address):
            done.wait()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        process.kill()
        done.set()
        thread.join()


def play(settings: dict[str, str], at_step: dict[int, Any]) -> list[Any]:
    """A stream on two ranks. `at_step`: what rank 0 does before a step."""

    def on_rank(groups: Groups) -> Report:
        engine = Engine(groups)
        stream = Stream(engine, 7, groups.rank, Faults(host_noise=160, copy_steps=4))
        tick = engine.cache.check_hicache_events
        calls = iter(range(10**6))

        def check() -> None:
            call = next(calls)
            if groups.rank == 0 and call in at_step:
                at_step[call]()
            tick()

        engine.cache.check_hicache_events = check
        report = stream.play(STEPS)
        engine.close()
        return report

    return run_ranks(on_rank, environment=settings)


def test_a_killed_coordinator_is_followed_by_the_next_of_the_list_and_the_trees_stay_equal() -> None:
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/a.sock", f"ipc://{folder}/b.sock"]
        with coordinator(addresses[0]) as first, coordinator(addresses[1]):
            settings = {"KVCOORD_COORDINATORS": ",".join(addresses)}
            reports = values(play(settings, {200: lambda: os.kill(first.pid, signal.SIGKILL)}))
    for report in reports:
        assert report.steps == reports[0].steps
        assert len(report.steps) == STEPS
        assert report.wrong_bytes == 0
        assert report.leaks == []


def test_a_coordinator_that_is_started_again_goes_on_where_it_was() -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/a.sock"
        with coordinator(address) as first, restarting(first, address):
            at_step = {200: lambda: os.kill(first.pid, signal.SIGKILL)}
            reports = values(play({"KVCOORD_COORDINATORS": address}, at_step))
    for report in reports:
        assert report.steps == reports[0].steps
        assert report.leaks == []


def test_without_any_coordinator_every_rank_raises_one_error_that_names_the_cause() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvcoord.yaml"
        file.write_text("timeouts:\n  group_deadline_s: 2\n  heartbeat_timeout_s: 60\n  heartbeat_interval_s: 0.2\n")
        address = f"ipc://{folder}/a.sock"
        with coordinator(address) as only:
            settings = {"KVCOORD_COORDINATORS": address, "KVCOORD_CONFIG": str(file)}
            results = play(settings, {200: lambda: os.kill(only.pid, signal.SIGKILL)})
    for result in results:
        assert result.error.startswith("GroupLost"), result
        assert "coordinator" in result.error
