import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvcoord.errors import ConfigError, PeerUnavailable, UsageError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.shared import SharedHandle, SharedPages, attach
from tests.leaks import open_files

GEOMETRY = PoolGeometry(name=f"shared-{os.getpid()}", layer_count=2, page_bytes=4096, dtype="float16")

ENGINE = """
import sys, msgspec
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.shared import SharedPages

pages = SharedPages.create(msgspec.json.decode(sys.argv[1], type=PoolGeometry), 4)
pages.memory.view(1, 3)[:] = b"e" * 4096
print(msgspec.json.encode(pages.handle()).decode(), flush=True)
for line in sys.stdin:
    if line == "close\\n":
        pages.close()
    print(bytes(pages.memory.view(0, 2)[:5]).decode() if line == "read\\n" else "done", flush=True)
"""

STRANGER = """
import os, sys, msgspec
from kvcoord.errors import ConfigError
from kvcoord.memory.shared import SharedHandle, attach

handle = msgspec.json.decode(sys.argv[1], type=SharedHandle)
os.setuid(65534)
try:
    attach(handle)
except ConfigError as error:
    print(error)
"""


class Engine:
    """A second process that owns shared pages and does what it is told, one line at a time."""

    def __init__(self) -> None:
        geometry = msgspec.json.encode(GEOMETRY).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, geometry], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle = msgspec.json.decode(self._answer(), type=SharedHandle)

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    if engine.process.returncode is None:
        engine.kill()


def mapped_here() -> bool:
    return GEOMETRY.name in Path("/proc/self/maps").read_text()


def opened_here() -> bool:
    return any(GEOMETRY.name in name for name in open_files())


def test_two_processes_see_each_others_bytes(engine: Engine) -> None:
    memory = attach(engine.handle)
    assert bytes(memory.view(1, 3)) == b"e" * 4096
    memory.view(0, 2)[:5] = b"hello"
    assert engine.ask("read") == "hello"
    memory.close()


def test_a_map_survives_kill_9_of_its_creator_and_leaves_nothing_behind(engine: Engine) -> None:
    memory = attach(engine.handle)
    engine.kill()
    assert bytes(memory.view(1, 3)) == b"e" * 4096
    memory.view(0, 0)[:] = b"s" * 4096
    assert bytes(memory.view(0, 0)) == b"s" * 4096
    assert mapped_here()
    memory.close()
    assert not mapped_here()
    assert not [name for name in os.listdir("/dev/shm") if GEOMETRY.name in name]


def test_attaching_to_a_dead_engine_says_that_it_is_gone(engine: Engine) -> None:
    engine.kill()
    with pytest.raises(PeerUnavailable) as caught:
        attach(engine.handle)
    assert str(engine.handle.pid) in caught.value.address
    assert "gone" in caught.value.cause
    assert not mapped_here()


def test_attaching_to_pages_that_the_engine_closed_is_refused(engine: Engine) -> None:
    engine.ask("close")
    with pytest.raises(PeerUnavailable):
        attach(engine.handle)


def test_another_file_at_the_same_number_is_never_mapped() -> None:
    with SharedPages.create(GEOMETRY, 4) as first:
        handle = first.handle()
    with SharedPages.create(GEOMETRY, 4) as second:
        assert second.handle().fd == handle.fd
        with pytest.raises(PeerUnavailable) as caught:
            attach(handle)
        assert "another file" in caught.value.cause


def test_a_handle_whose_size_contradicts_its_geometry_is_refused() -> None:
    with SharedPages.create(GEOMETRY, 4) as pages:
        for forged in (
            msgspec.structs.replace(pages.handle(), capacity=5),
            msgspec.structs.replace(pages.handle(), size_bytes=4096),
        ):
            with pytest.raises(ConfigError) as caught:
                attach(forged)
            assert caught.value.field == "handle.size_bytes"
        larger = msgspec.structs.replace(pages.handle(), capacity=8, size_bytes=GEOMETRY.total_bytes(8))
        with pytest.raises(PeerUnavailable):
            attach(larger)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_told_to_run_as_the_same_user() -> None:
    with SharedPages.create(GEOMETRY, 4) as pages:
        handle = msgspec.json.encode(pages.handle()).decode()
        stranger = subprocess.run([sys.executable, "-c", STRANGER, handle], capture_output=True, text=True, check=True)
    assert f"handle.pid={os.getpid()}" in stranger.stdout
    assert "same user" in stranger.stdout


def test_nobody_can_shrink_the_file_under_a_map() -> None:
    with SharedPages.create(GEOMETRY, 4) as pages:
        handle = pages.handle()
        for size_bytes in (0, handle.size_bytes * 2):
            with pytest.raises(PermissionError):
                os.truncate(f"/proc/self/fd/{handle.fd}", size_bytes)


def test_closing_is_idempotent_and_gives_the_file_and_the_map_back() -> None:
    pages = SharedPages.create(GEOMETRY, 4)
    assert opened_here()
    pages.close()
    pages.close()
    assert not mapped_here()
    assert not opened_here()
    with pytest.raises(UsageError):
        pages.handle()


@pytest.mark.parametrize("capacity", [2**45, 2**60])
def test_pages_that_no_host_can_map_leave_no_file_open(capacity: int) -> None:
    with pytest.raises(ConfigError) as caught:
        SharedPages.create(GEOMETRY, capacity)
    assert caught.value.field.endswith("capacity")
    assert not opened_here()


def test_a_handle_from_the_wire_is_checked_field_by_field() -> None:
    with SharedPages.create(GEOMETRY, 4) as pages:
        good = msgspec.to_builtins(pages.handle())
    assert msgspec.convert(good, SharedHandle).geometry == GEOMETRY
    spoil: list[Callable[[], object]] = [
        lambda: msgspec.convert({**good, "pid": 0}, SharedHandle),
        lambda: msgspec.convert({**good, "fd": -1}, SharedHandle),
        lambda: msgspec.convert({**good, "geometry": {**good["geometry"], "page_bytes": 0}}, SharedHandle),
    ]
    for convert in spoil:
        with pytest.raises(msgspec.ValidationError):
            convert()
