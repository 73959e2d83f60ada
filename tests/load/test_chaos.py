"""Runs under chaos: short ones with real processes, and their parts."""

import asyncio
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvcoord.load.chaos.faults import WEIGHTS, FaultKind, draw
from kvcoord.load.chaos.link import Link, LinkState
from kvcoord.load.chaos.memory import SETTLED_AGE_S, WATCHED_AGE_S, MemoryWatch, resident_bytes
from kvcoord.load.chaos.report import ChaosSummary, fault_rows, table
from kvcoord.load.chaos.run import run

SECONDS = 20.0


def nothing_in(folder: Path) -> bool:
    return not list(folder.iterdir())


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other end is gone, however it went."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_twenty_seconds_of_chaos_break_no_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seed = int.from_bytes(os.urandom(4), "little")
    summary = await run(seed, SECONDS, ranks=2)
    assert summary.violations == [], f"seed {seed}"
    assert sum(row.faults for row in summary.faults) > 3
    assert summary.pages_verified > 0
    assert nothing_in(tmp_path)


def test_the_same_seed_draws_the_same_faults_and_every_kind_comes() -> None:
    first, second = Random(7), Random(7)
    drawn = [draw(first, 4) for _ in range(400)]
    assert drawn == [draw(second, 4) for _ in range(400)]
    assert {fault.kind for fault in drawn} == set(FaultKind) == set(WEIGHTS)
    assert {fault.target for fault in drawn if fault.kind is FaultKind.KILL_WORKER} == {0, 1, 2, 3}


# --- a line that can be cut -----------------------------------------------------------------------------------------


class Echo:
    """A server behind a link, and a client in front of it."""

    def __init__(self, folder: Path) -> None:
        self.link = Link(folder / "front.sock", folder / "back.sock")
        self._front, self._back = folder / "front.sock", folder / "back.sock"

    async def __aenter__(self) -> "Echo":
        self._serving: list[asyncio.Task[None]] = []
        self._server = await asyncio.start_unix_server(self._accept, self._back)
        await self.link.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.close()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._serving)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._front)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    @staticmethod
    async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()


async def test_an_open_link_passes_everything_and_a_cut_one_breaks_and_refuses(tmp_path: Path) -> None:
    async with Echo(tmp_path) as echo:
        reader, writer = await echo.connect()
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"
        echo.link.set(LinkState.CUT)
        assert await rest(reader) == b""
        again, other = await echo.connect()
        assert await rest(again) == b""
        echo.link.set(LinkState.OPEN)
        reader, third = await echo.connect()
        third.write(b"two\n")
        assert await reader.readline() == b"two\n"
        for end in (writer, other, third):
            end.close()


@pytest.mark.parametrize("state", [LinkState.FROZEN, LinkState.UP_FROZEN, LinkState.DOWN_FROZEN])
async def test_a_frozen_link_holds_bytes_back_and_delivers_them_later(state: LinkState, tmp_path: Path) -> None:
    async with Echo(tmp_path) as echo:
        reader, writer = await echo.connect()
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"
        echo.link.set(state)
        writer.write(b"two\n")
        waiting = asyncio.ensure_future(reader.readline())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        echo.link.set(LinkState.OPEN)
        assert await waiting == b"two\n"
        writer.close()


async def test_a_link_to_nobody_refuses(tmp_path: Path) -> None:
    link = Link(tmp_path / "front.sock", tmp_path / "nobody.sock")
    await link.open()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "front.sock")
    assert await rest(reader) == b""
    writer.close()
    await link.close()
    assert nothing_in(tmp_path)


# --- what is watched and shown --------------------------------------------------------------------------------------


def test_memory_that_grows_after_a_process_has_settled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {1: 100, 2: 200, 3: 900}
    monkeypatch.setattr("kvcoord.load.chaos.memory.resident_bytes", sizes.get)
    watch = MemoryWatch()
    watch.look(0.0, {1: "worker", 2: "worker", 3: "engine"})
    sizes[1] = 150
    watch.look(SETTLED_AGE_S - 1, {1: "worker", 2: "worker", 3: "engine"})
    sizes.update({1: 400, 2: 210})
    watch.look(WATCHED_AGE_S, {1: "worker", 2: "worker"})
    grown = watch.growth()
    assert list(grown) == ["worker"]
    assert (grown["worker"].lives, grown["worker"].growth_bytes_max) == (2, 250)


def test_resident_memory_is_read_of_a_process_that_is_there() -> None:
    own = resident_bytes(os.getpid())
    assert own is not None
    assert own > 1 << 20
    assert resident_bytes(1 << 30) is None


def test_the_table_counts_faults_by_kind_and_shows_what_was_broken() -> None:
    rows = fault_rows([(FaultKind.KILL_WORKER, 1.0), (FaultKind.KILL_WORKER, None), (FaultKind.KILL_WORKER, 3.0)])
    assert [(row.kind, row.faults, row.recovered, row.median_s, row.max_s) for row in rows] == [
        (FaultKind.KILL_WORKER, 3, 2, 2.0, 3.0)
    ]
    summary = ChaosSummary(
        seed=1,
        ranks=2,
        seconds=1.0,
        faults=rows,
        requests=1,
        pages_verified=1,
        pages_corrupt=0,
        step_max_s=0.1,
        lives_ended={},
        memory={},
        violations=["rank 1 leaks 3 pages"],
    )
    shown = [str(part) for part in table(summary)]
    assert "VIOLATION rank 1 leaks 3 pages" in shown
    assert shown[-1] == "promises broken"


async def test_a_process_that_ends_by_itself_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def murder(fault: object, group: object) -> None:
        group.workers[0].child.signal(signal.SIGTERM)  # type: ignore[attr-defined]

    monkeypatch.setattr("kvcoord.load.chaos.run.inflict", murder)
    monkeypatch.setattr("kvcoord.load.chaos.run.RECOVERY_LIMIT_S", 20.0)
    summary = await run(1, 1.0, ranks=1)
    assert any("worker 0: ended" in violation for violation in summary.violations)
