"""Child processes of a replay: none outlives it, and one that dies is heard."""

import asyncio
import os
import signal

import pytest

from kvcoord.errors import PeerUnavailable
from kvcoord.load.children import Child, Children
from kvcoord.load.dialogue import Settled

PATIENT = "import sys; print('here', flush=True); sys.stdin.read()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
ECHO = "import sys; sys.stdout.write(sys.stdin.readline())"


async def start(children: Children, code: str, *, talks: bool = False) -> Child:
    return await children.start("the child", ["-c", code], talks=talks)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_hears_a_line_and_answers_with_one() -> None:
    async with Children() as children:
        child = await start(children, ECHO, talks=True)
        child.say(Settled(True))
        assert await child.hear() == b'{"type":"settled","everywhere":true}\n'


async def test_a_child_that_ends_by_itself_is_an_error_with_code_and_last_words() -> None:
    async with Children() as children:
        child = await start(children, "import sys; print('no room left', file=sys.stderr); sys.exit(3)")
        with pytest.raises(PeerUnavailable) as died:
            await child.watch()
        assert str(died.value) == "the child: ended with exit code 3; its last words:\nno room left"
        with pytest.raises(PeerUnavailable):
            await child.hear()


async def test_a_child_that_is_killed_is_an_error_with_the_signal() -> None:
    async with Children() as children:
        child = await start(children, PATIENT, talks=True)
        await child.hear()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(PeerUnavailable, match="killed by SIGKILL"):
            await child.watch()


@pytest.mark.parametrize("failure", [None, RuntimeError, asyncio.CancelledError])
async def test_no_child_outlives_the_block_however_it_is_left(failure: type[BaseException] | None) -> None:
    pids = []
    try:
        async with Children() as children:
            for _ in range(3):
                child = await start(children, PATIENT, talks=True)
                await child.hear()
                pids.append(child.pid)
            if failure is not None:
                raise failure
    except (RuntimeError, asyncio.CancelledError):
        pass
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


async def test_a_child_that_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcoord.load.children.END_TIMEOUT_S", 0.01)
    async with Children() as children:
        child = await start(children, STUBBORN)
        await child.hear()
    assert not alive(child.pid)


async def test_options_in_the_environment_do_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOORD_DEVICE_PAGES", "1")
    async with Children() as children:
        child = await start(children, "import os; print('KVCOORD_DEVICE_PAGES' in os.environ)")
        assert await child.hear() == b"False\n"
