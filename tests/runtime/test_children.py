"""Child processes, real ones: none outlives its parent's block, and one that dies is heard."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from kvcoord.errors import DeadlineExceeded, PeerUnavailable
from kvcoord.runtime.children import Child, Children, ending
from kvcoord.runtime.status import ask

PATIENT = "import sys; print('here', flush=True); sys.stdin.read()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
ECHO = "import sys; sys.stdout.write(sys.stdin.readline())"


async def start(children: Children, code: str, *, talks: bool = False, generation: int = 0) -> Child:
    return await children.start("the child", ["-c", code], talks=talks, generation=generation)


def coordinator(folder: Path, name: str = "c") -> list[str]:
    return ["coordinator", "--bind", f"ipc://{folder}/{name}.sock", "--http", "none", "--set", "log_level=error"]


def _note(ended: list[str], name: str, _: object) -> None:
    ended.append(name)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- one child ------------------------------------------------------------------------------------------------------


async def test_a_child_hears_a_line_and_answers_with_one() -> None:
    async with Children() as children:
        child = await start(children, ECHO, talks=True)
        child.say(b"hello\n")
        assert await child.hear() == b"hello\n"


async def test_a_child_that_ends_by_itself_is_an_error_with_code_and_last_words() -> None:
    async with Children(keep_errors=True) as children:
        child = await start(children, "import sys; print('no room left', file=sys.stderr); sys.exit(3)")
        with pytest.raises(PeerUnavailable) as died:
            await child.watch()
        assert str(died.value) == "the child: ended with exit code 3; its last words:\nno room left"
        with pytest.raises(PeerUnavailable):
            await child.hear()


async def test_a_child_that_ends_as_expected_is_no_error() -> None:
    async with Children() as children:
        child = await start(children, "raise SystemExit(9)")
        child.expected = 9
        await child.watch()


async def test_a_child_that_is_killed_is_an_error_with_the_signal() -> None:
    async with Children() as children:
        child = await start(children, PATIENT, talks=True)
        await child.hear()
        child.signal(signal.SIGKILL)
        with pytest.raises(PeerUnavailable, match="killed by SIGKILL"):
            await child.watch()


async def test_a_child_that_never_serves_and_one_that_says_something_else_are_errors() -> None:
    async with Children() as children:
        silent = await start(children, "import signal; signal.pause()")
        with pytest.raises(DeadlineExceeded, match="ready line of the child"):
            await silent.ready(timeout_s=0.01)
        other = await start(children, "print('good morning')")
        with pytest.raises(PeerUnavailable, match="something else"):
            await other.ready()


async def test_options_in_the_environment_do_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOORD_DEVICE_PAGES", "1")
    async with Children() as children:
        child = await start(children, "import os; print('KVCOORD_DEVICE_PAGES' in os.environ)")
        assert await child.hear() == b"False\n"


def test_an_ending_is_told_in_words() -> None:
    assert (ending(3), ending(-9)) == ("exit code 3", "SIGKILL")


# --- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [None, RuntimeError, asyncio.CancelledError])
async def test_no_child_outlives_the_block_however_it_is_left(failure: type[BaseException] | None) -> None:
    pids = []
    try:
        async with Children() as children:
            for generation in range(3):
                child = await start(children, PATIENT, talks=True, generation=generation)
                await child.hear()
                pids.append(child.pid)
            if failure is not None:
                raise failure
    except (RuntimeError, asyncio.CancelledError):
        pass
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("stop", [False, True])
async def test_a_child_that_does_not_end_when_asked_is_killed(stop: bool) -> None:
    async with Children(end_timeout_s=0.01) as children:
        child = await start(children, STUBBORN)
        await child.hear()
        if stop:
            child.signal(signal.SIGSTOP)
    assert not alive(child.pid)


async def test_the_youngest_generation_ends_first() -> None:
    ended: list[str] = []
    async with Children() as children:
        for name, generation in (("old", 0), ("young", 1)):
            child = await start(children, PATIENT, talks=True, generation=generation)
            await child.hear()
            asyncio.ensure_future(child.wait()).add_done_callback(partial(_note, ended, name))
    assert ended == ["young", "old"]


# --- commands that serve --------------------------------------------------------------------------------------------


async def test_commands_serve_until_the_block_is_left(tmp_path: Path) -> None:
    async with Children() as children:
        ready = await children.serve({"one": coordinator(tmp_path, "1"), "two": coordinator(tmp_path, "2")})
        addresses = [address for child in ready for address in child.addresses]
        assert addresses == [f"ipc://{tmp_path}/{name}.sock" for name in "12"]
        assert (await ask(addresses[1], 60.0)).ready
    for address in addresses:
        with pytest.raises(PeerUnavailable):
            await ask(address, 60.0)


async def test_a_command_that_ends_before_it_serves_is_named_and_the_others_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerUnavailable, match="bad: ended with exit code 2"):
        async with Children() as children:
            await children.serve({"good": coordinator(tmp_path), "bad": ["coordinator", "--http", "0.0.0.0:1"]})
    assert "loopback" in capfd.readouterr().err
    with pytest.raises(PeerUnavailable):
        await ask(f"ipc://{tmp_path}/c.sock", 60.0)


async def test_a_child_that_ends_by_itself_is_told_once_it_has() -> None:
    async with Children() as children:
        await start(children, PATIENT, talks=True)
        victim = await start(children, PATIENT, talks=True, generation=1)
        waiting = asyncio.ensure_future(children.wait_ended())
        victim.signal(signal.SIGKILL)
        assert await waiting is victim
        assert victim.code == -signal.SIGKILL
