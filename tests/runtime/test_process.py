"""Real processes: how they start, stop and end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvcoord.errors import (
    ConfigError,
    Diverged,
    GroupLost,
    InvariantBroken,
    JoinRefused,
    KvcoordError,
    PeerUnavailable,
    UsageError,
)
from kvcoord.observability.recorder import load
from kvcoord.runtime.exits import Exit, cause_of, exit_code

REPOSITORY = Path(__file__).resolve().parents[2]

PREAMBLE = """
import asyncio, os, sys, time
from kvcoord import errors
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.process import run

async def serve(stop):
    recorder = FlightRecorder("tester", 8)
    recorder.record(0.0, "began", "")
    stop.watch(recorder)
    stop.ready(["ipc:///somewhere"], "127.0.0.1:1")
    await stop.wait()
    print("stopping because of", stop.cause, flush=True)
    return 0
"""


@contextmanager
def started(code: str, folder: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this code, with the folder for its dumps. Ended at the end of the block."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        # All of its session, also a child that should have ended with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


SERVE = "sys.exit(run(serve, shutdown_timeout_s=20, ready_fd=1))"


def wait_ready(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    ready: dict[str, object] = json.loads(process.stdout.readline())
    return ready


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    with started(SERVE, tmp_path) as process:
        assert wait_ready(process) == {"ready": True, "addresses": ["ipc:///somewhere"], "http": "127.0.0.1:1"}
        process.send_signal(number)
        assert finish(process) == (0, f"stopping because of {number.name}\n", "")


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    code = """
async def slow(stop):
    await serve(stop)
    await asyncio.sleep(3600)
sys.exit(run(slow, shutdown_timeout_s=3600, ready_fd=1))
"""
    with started(code, tmp_path) as process:
        wait_ready(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping because of SIGINT\n"
        process.send_signal(signal.SIGTERM)
        code_, _, err = finish(process)
    assert (code_, err) == (1, "kvcoord: SIGTERM came while stopping: ended at once\n")


@pytest.mark.parametrize("stuck", ["await asyncio.sleep(3600)", "time.sleep(3600)"])
def test_a_process_that_does_not_stop_ends_after_its_shutdown_timeout(tmp_path: Path, stuck: str) -> None:
    code = f"""
async def hang(stop):
    await serve(stop)
    {stuck}
sys.exit(run(hang, shutdown_timeout_s=0.2, ready_fd=1))
"""
    with started(code, tmp_path) as process:
        wait_ready(process)
        process.send_signal(signal.SIGTERM)
        code_, _, err = finish(process)
    assert (code_, err) == (1, "kvcoord: not stopped within shutdown_timeout_s=0.2 s: ended at once\n")


def test_a_signal_is_noticed_even_by_a_blocked_event_loop(tmp_path: Path) -> None:
    code = """
async def blocked(stop):
    stop.ready([])
    time.sleep(3600)
sys.exit(run(blocked, shutdown_timeout_s=0.2, ready_fd=1))
"""
    with started(code, tmp_path) as process:
        wait_ready(process)
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 1


def test_sigusr1_writes_the_flight_recorder_and_the_process_goes_on(tmp_path: Path) -> None:
    with started(SERVE, tmp_path) as process:
        wait_ready(process)
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        said = process.stderr.readline()
        path = Path(said.rpartition(" ")[2].strip())
        assert said == f"kvcoord: flight recorder written to {path}\n"
        dump = load(path)
        assert (dump.header.process, dump.header.cause) == ("tester", "SIGUSR1")
        assert [entry.kind for entry in dump.entries] == ["began"]
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 0


ERRORS: dict[str, tuple[KvcoordError, int]] = {
    "usage": (UsageError("field", 1, "do\nbetter"), Exit.USAGE),
    "config": (ConfigError("field", 1, "do better", "flag field"), Exit.USAGE),
    "refused": (JoinRefused("g", "mismatch", "page_tokens", 1, 32, 0, 64), Exit.REFUSED),
    "lost": (GroupLost("g", "rank 1 is missing", 60.0), Exit.LOST),
    "diverged": (Diverged("g", 3, [[0], [1]], "write/1"), Exit.LOST),
    "unavailable": (PeerUnavailable("ipc:///x", "gone"), Exit.FAILURE),
    "broken": (InvariantBroken("agreement", "two outcomes"), Exit.FAILURE),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_its_exit_code(name: str) -> None:
    error, code = ERRORS[name]
    assert exit_code(error) == code


def test_an_error_is_one_line_and_its_exit_code(tmp_path: Path) -> None:
    code = """
async def refuse(stop):
    raise errors.JoinRefused("g", "mismatch", "page_tokens", 1, 32, 0, 64)
sys.exit(run(refuse, shutdown_timeout_s=5))
"""
    with started(code, tmp_path) as process:
        code_, out, err = finish(process)
    assert (code_, out, err.count("\n")) == (Exit.REFUSED, "", 1)
    assert "page_tokens is 32 on rank 1 and 64 on rank 0" in err


def test_an_error_of_a_task_group_is_found(tmp_path: Path) -> None:
    code = """
async def fail():
    raise errors.GroupLost("g", "rank 1 is missing", 60.0)
async def main(stop):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
        await stop.wait()
sys.exit(run(main, shutdown_timeout_s=5))
"""
    with started(code, tmp_path) as process:
        code_, _, err = finish(process)
    assert (code_, "Traceback" in err) == (Exit.LOST, False)


def test_a_defect_is_never_mistaken_for_an_expected_error() -> None:
    expected, defect = UsageError("field", 1, "do better"), ValueError("a defect")
    assert cause_of(ExceptionGroup("", [expected, defect])) is None
    assert cause_of(ExceptionGroup("", [ExceptionGroup("", [expected])])) is expected


def test_a_defect_shows_its_traceback_and_dumps_what_happened_before(tmp_path: Path) -> None:
    code = """
async def main(stop):
    stop.request("nothing")
    await serve(stop)
    raise ValueError("a defect")
sys.exit(run(main, shutdown_timeout_s=5))
"""
    with started(code, tmp_path) as process:
        code_, _, err = finish(process)
    assert code_ == 1
    assert "flight recorder written" in err
    assert "ValueError: a defect" in err


def test_a_ready_line_that_nobody_reads_ends_the_process(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started(f"sys.exit(run(serve, shutdown_timeout_s=5, ready_fd={writing}))", tmp_path, pass_fds=[writing]) as it:
        os.close(writing)
        code_, _, err = finish(it)
    assert code_ == 1
    assert "does not read the ready line" in err


def test_a_process_that_follows_its_parent_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    child = "sys.exit(run(serve, shutdown_timeout_s=20, ready_fd=1, exit_with_parent=True))"
    parent = f"import subprocess; subprocess.run([sys.executable, '-c', {PREAMBLE + child!r}])"
    with started(parent, tmp_path) as process:
        wait_ready(process)
        process.kill()
        assert process.stdout is not None
        # The pipe ends only when the child, its last holder, has ended.
        assert process.stdout.read() == "stopping because of SIGTERM\n"


def test_dumps_are_not_written_where_somebody_else_could_put_things(tmp_path: Path) -> None:
    (tmp_path / f"kvcoord-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"kvcoord-{os.getuid()}").chmod(0o777)
    with started(SERVE, tmp_path) as process:
        wait_ready(process)
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        assert "only this user may enter" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 0
