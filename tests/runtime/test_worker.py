"""Workers with real sockets, memory and copies: their engines, their group, and bytes that are no calls."""

import asyncio
import random
import socket
from pathlib import Path

import pytest

import kvcoord
from kvcoord.config import GroupConfig
from kvcoord.domain import Committed
from kvcoord.errors import GroupRenewed, JoinRefused, PeerUnavailable, UsageError
from kvcoord.protocol.codec import Decoder, encode
from kvcoord.protocol.local import LOCAL_VERSION, Answers, Calls, Failed, FromWorker, Match, Open, Opened
from kvcoord.protocol.messages import Alive
from tests.leaks import grows, open_files
from tests.runtime.engine import KEYS, Engine, on_all
from tests.runtime.groups import ended, group


async def test_bytes_written_through_come_back_after_they_left_the_device(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made, Engine(made.address(0)) as a, Engine(made.address(1)) as b:
        await on_all(a.advance(), b.advance())
        await on_all(a.store(KEYS, b"a"), b.store(KEYS, b"b"))
        await on_all(a.settle(), b.settle())
        assert await on_all(a.cache.evict("device", 4), b.cache.evict("device", 4)) == [4, 4]
        assert (await a.cache.match(KEYS)).host_pages == 4
        assert await on_all(a.read(KEYS), b.read(KEYS)) == [{b"a" * 64}, {b"b" * 64}]
        await on_all(a.settle(), b.settle())


async def test_layers_of_a_load_back_can_be_awaited_one_by_one(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        await engine.store(KEYS, b"x")
        await engine.settle()
        await engine.cache.evict("device", 4)
        own = await engine.cache.allocate(4)
        load = await engine.cache.load_back(KEYS, own.slots)
        assert load.pages == 4
        for layer in range(4):
            await load.layer(layer)
            view = engine.cache.device[0].view(layer, own.slots[0][3])
            assert bytes(view) == b"x" * 64
        await load
        await engine.settle()
        assert (await engine.cache.match(KEYS)).device_pages == 4


async def test_a_second_engine_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    async with (
        group(tmp_path, world_size=1) as made,
        Engine(made.address(0)),
        kvcoord.connect(made.address(0)) as other,
    ):
        with pytest.raises(UsageError, match="another engine is connected"):
            await other.register()
        assert (await other.match(KEYS)).pages == 0


async def test_the_next_engine_begins_with_a_new_membership(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made:
        incarnations = set()
        for _ in range(3):
            async with Engine(made.address(0)) as engine:
                await engine.advance()
                await engine.store(KEYS, b"x")
                await engine.advance()
                incarnations.add(made.workers[0].incarnation)
        assert len(incarnations) == 3


async def test_engines_of_the_others_learn_that_a_worker_came_back_with_nothing(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made, Engine(made.address(0)) as survivor:
        async with Engine(made.address(1)) as lost:
            await on_all(survivor.advance(), lost.advance())
        with pytest.raises(GroupRenewed, match="rank 1"):
            await survivor.hold_and_release_for_ever()


async def test_a_worker_that_is_configured_differently_ends_with_both_values(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        made.config = GroupConfig(world_size=2, pools=made.config.pools)
        other = await made.worker(1)
        error = await ended(other)
        assert isinstance(error, JoinRefused)
        assert (error.field, error.value, error.other_rank, error.other_value) == ("world_size", 2, 0, 1)


async def test_the_same_rank_twice_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        twin = await made.worker(0, listen=f"ipc://{tmp_path}/twin.sock")
        error = await ended(twin)
        assert isinstance(error, JoinRefused)
        assert error.reason == "duplicate_rank"
        await engine.advance()


async def test_a_coordinator_that_is_restarted_learns_from_the_ranks_and_nothing_is_lost(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made, Engine(made.address(0)) as a, Engine(made.address(1)) as b:
        await on_all(a.advance(), b.advance())
        await on_all(a.store(KEYS, b"a"), b.store(KEYS, b"b"))
        await made.restart_coordinator()
        await on_all(a.settle(), b.settle())
        await on_all(a.cache.evict("device", 4), b.cache.evict("device", 4))
        assert await on_all(a.read(KEYS), b.read(KEYS)) == [{b"a" * 64}, {b"b" * 64}]
        await on_all(a.settle(), b.settle())


async def test_an_engine_whose_worker_goes_gets_an_error_and_no_hang(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=2) as made, Engine(made.address(0)) as engine:
        waiting = asyncio.ensure_future(engine.cache.advance(0))
        await engine.cache.match(KEYS)
        second = asyncio.ensure_future(engine.cache.advance(1))
        third = asyncio.ensure_future(engine.cache.advance(2))
        await waiting
        await made.workers[0].close()
        for lost in (second, third):
            with pytest.raises(PeerUnavailable):
                await lost


# --- bytes that are no calls ------------------------------------------------------------------------------------------


def raw_frames(rng: random.Random) -> list[bytes]:
    """Frames as a broken or hostile engine might send them."""
    good = encode(Calls([(7, Match(b"k" * 16))]))
    return [
        b"",
        b"\x01",
        good[:-1],
        good[: len(good) // 2],
        b"\x07" + good[1:],
        encode(Alive(1, 2, 3)),
        encode(Calls([(8, Match(b"short"))])),
        *(rng.randbytes(rng.randint(1, 200)) for _ in range(50)),
    ]


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes) -> FromWorker:
    """Sends one frame and returns the next message."""
    writer.write(len(payload).to_bytes(4, "little") + payload)
    size = int.from_bytes(await reader.readexactly(4), "little")
    decoder: Decoder[FromWorker] = Decoder(FromWorker)
    return decoder.decode(await reader.readexactly(size))


async def test_frames_that_are_no_calls_are_counted_and_answered_and_harm_nobody(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/r0.sock")
        frames = raw_frames(random.Random(5))
        for frame in frames:
            answers = await ask(reader, writer, frame)
            assert isinstance(answers, Answers)
            assert all(isinstance(answer, Failed) for _, answer in answers.answers)
        opened = await ask(reader, writer, encode(Calls([(1, Open(LOCAL_VERSION))])))
        assert isinstance(opened, Answers)
        assert isinstance(opened.answers[0][1], Opened)
        writer.close()
        assert sum(made.workers[0].ignored.values()) == len(frames) - 1
        await engine.store(KEYS, b"x")
        await engine.settle()


async def test_an_oversized_frame_ends_only_its_own_connection(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as made, Engine(made.address(0)) as engine:
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/r0.sock")
        writer.write((1 << 31).to_bytes(4, "little"))
        assert await reader.read() == b""
        writer.close()
        await engine.advance()
        assert made.workers[0].address.endswith("r0.sock")


async def test_an_engine_that_is_killed_leaves_a_worker_that_serves_the_next_one(tmp_path: Path) -> None:
    files: list[int] = []
    async with group(tmp_path, world_size=1) as made:
        for _ in range(8):
            plug = socket.socket(socket.AF_UNIX)
            plug.connect(f"{tmp_path}/r0.sock")
            half = encode(Calls([(1, Open(LOCAL_VERSION))]))
            plug.send(len(half).to_bytes(4, "little") + half[:3])
            plug.close()
            async with Engine(made.address(0)) as engine:
                await engine.advance()
                await engine.store(KEYS, b"x")
                await engine.settle()
                outcome = await engine.cache.agree("own/1", True)
                assert isinstance(outcome, Committed)
            await made.lives_over(len(files) + 1)
            files.append(len(open_files()))
    assert not grows(files)


async def test_several_pools_are_taken_together(tmp_path: Path) -> None:
    pools = [{"name": "kv", "page_bytes": 64, "layers": 4}, {"name": "indexer", "page_bytes": 16, "layers": 2}]
    async with group(tmp_path, world_size=1, pools=pools) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        lease = await engine.cache.acquire(KEYS)
        assert [len(slots) for slots in lease.slots] == [4, 4]
        for pool, memory in enumerate(engine.cache.device):
            for slot in lease.slots[pool]:
                memory.view(0, slot)[:4] = bytes([pool, slot, 7, 7])
        await lease.write_through(deferred=True)
        await lease.release()
        await engine.settle()
        await engine.cache.evict("device", 4)
        async with await engine.cache.acquire(KEYS) as again:
            assert again.host_pages == 4
            for pool, memory in enumerate(engine.cache.device):
                assert [bytes(memory.view(0, slot)[2:4]) for slot in again.slots[pool]] == [b"\x07\x07"] * 4
        await engine.settle()


async def send_for_ever(plug: socket.socket, frame: bytes) -> None:
    """Until the other end does not want more."""
    while True:
        await asyncio.get_running_loop().sock_sendall(plug, frame)


async def test_an_engine_that_reads_no_answers_loses_its_connection_and_nobody_else_does(tmp_path: Path) -> None:
    pools = [{"name": f"{number}-{'x' * 60}", "page_bytes": 64, "layers": 4} for number in range(16)]
    async with group(tmp_path, world_size=1, pools=pools) as made, Engine(made.address(0)) as engine:
        await engine.advance()
        plug = socket.socket(socket.AF_UNIX)
        plug.setblocking(False)
        plug.connect(f"{tmp_path}/r0.sock")
        asked = encode(Calls([(number, Open(LOCAL_VERSION)) for number in range(1, 1000)]))
        frame = len(asked).to_bytes(4, "little") + asked
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            await send_for_ever(plug, frame)
        plug.close()
        assert made.workers[0].ignored["session_full"] == 1
        await engine.store(KEYS, b"x")
        await engine.settle()
