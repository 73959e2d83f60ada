import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.dma.moving import move_calls
from kvcoord.dma.pieces import Piece, PlanePair
from kvcoord.errors import TransferFailed, UsageError
from kvcoord.memory.geometry import PoolGeometry
from tests.dma.gate import Gate, stand_in
from tests.dma.pools import CAPACITY, LAYERS, PAGE_BYTES, Pools
from tests.leaks import own_threads

PAGE_TOTAL_BYTES = PAGE_BYTES * LAYERS


class Turns:
    """Counts the callbacks that a loop is asked to make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.soon = self.from_threads = 0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_soon", self._counted(loop.call_soon, "soon"))
        monkeypatch.setattr(loop, "call_soon_threadsafe", self._counted(loop.call_soon_threadsafe, "from_threads"))

    def _counted(self, call: Callable[..., object], counter: str) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            setattr(self, counter, getattr(self, counter) + 1)
            return call(*args, **kwargs)

        return counted


def engine_of(**options: int) -> CpuCopyEngine:
    return CpuCopyEngine(asyncio.get_running_loop(), **options)


async def test_a_small_transfer_is_copied_at_once_and_a_large_one_off_the_loops_thread(
    pools: Pools, gate: Gate
) -> None:
    gate.let(10**6)
    engine = engine_of(inline_bytes_max=2 * PAGE_TOTAL_BYTES)
    small = engine.submit(pools.plan("write/small", [0, 2]))
    assert gate.movers == [threading.get_ident()] * 2 * LAYERS
    await small
    await engine.submit(pools.plan("write/large", [10, 12, 14]))
    assert len(gate.movers) == (2 + 3) * LAYERS
    assert threading.get_ident() not in gate.movers[2 * LAYERS :]
    await engine.close()


async def test_the_loop_runs_on_while_a_thread_copies(pools: Pools, gate: Gate) -> None:
    engine = engine_of(inline_bytes_max=0)
    transfer = engine.submit(pools.plan("write/1", [0]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not transfer.done()
    gate.let(LAYERS)
    await transfer
    await engine.close()


async def test_a_small_transfer_never_overtakes_a_large_one_of_its_direction(pools: Pools, gate: Gate) -> None:
    engine = engine_of(inline_bytes_max=PAGE_TOTAL_BYTES)
    large = engine.submit(pools.plan("write/large", [0, 2]))
    small = engine.submit(pools.plan("write/small", [4]))
    assert gate.movers == []
    other_way = PoolCopy(pools.host, pools.device, [9], [9])
    await engine.submit(CopyPlan("load/small", Direction.HOST_TO_DEVICE, (other_way,)))
    assert not small.done()
    gate.let(3 * LAYERS)
    await small
    assert large.done()
    again = engine.submit(pools.plan("write/again", [5]))
    assert gate.movers[-1] == threading.get_ident()
    await again
    await engine.close()


async def test_layers_land_one_by_one_while_the_thread_is_still_copying(pools: Pools, gate: Gate) -> None:
    engine = engine_of(inline_bytes_max=0)
    transfer = engine.submit(pools.plan("load/1", [0]))
    for layer in range(LAYERS):
        waiting = asyncio.ensure_future(transfer.layer(layer))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.let(1)
        await waiting
        pools.expect_host([(0, 0)], layers=range(layer + 1))
    await transfer
    await engine.close()


async def test_a_finished_transfer_waits_for_an_earlier_one_in_another_thread(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_moved, first_may_move = threading.Semaphore(0), threading.Event()

    def move(planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        if pieces[0][0] == 0:
            assert first_may_move.wait(30)
        move_calls(planes, pieces)
        others_moved.release()

    stand_in(monkeypatch, move)
    engine = engine_of(inline_bytes_max=0, threads=2)
    transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(3)]
    settled: list[str] = []
    for transfer in transfers:
        transfer.add_done_callback(lambda transfer: settled.append(transfer.name))
    for _ in range(2 * LAYERS):
        assert others_moved.acquire(timeout=30)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(transfer.done() for transfer in transfers)
    first_may_move.set()
    await transfers[2]
    await asyncio.sleep(0)
    assert settled == ["write/0", "write/1", "write/2"]
    await engine.close()


async def test_a_pool_with_fewer_layers_is_not_copied_beyond_its_last(pools: Pools, gate: Gate) -> None:
    state = Pools(PoolGeometry("state", 2, 32, "float32"))
    engine = engine_of()
    await engine.submit(CopyPlan("write/1", Direction.DEVICE_TO_HOST, (pools.backup([0], [0]), state.backup([4], [9]))))
    assert len(gate.movers) == LAYERS + 2
    await engine.close()


async def test_memory_closed_during_a_copy_stays_mapped_until_it_is_over(pools: Pools, gate: Gate) -> None:
    engine = engine_of(inline_bytes_max=0)
    transfer = engine.submit(pools.plan("write/1", [0]))
    mapping = pools.host._map
    assert mapping is not None
    pools.host.close()
    pools.device.close()
    assert not mapping.closed
    gate.let(LAYERS)
    await transfer
    assert mapping[:PAGE_BYTES] != bytes(PAGE_BYTES)
    mapping.close()
    await engine.close()


async def test_the_number_of_open_transfers_is_bounded_and_the_limit_is_answered(pools: Pools, gate: Gate) -> None:
    engine = engine_of(inline_bytes_max=0, transfers_open_max=2)
    open_now = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(2)]
    with pytest.raises(UsageError) as caught:
        engine.submit(pools.plan("write/2", [2]))
    assert caught.value.field == "transfers_open_max"
    gate.let(3 * LAYERS)
    await asyncio.gather(*open_now)
    await engine.submit(pools.plan("write/2", [2]))
    await engine.close()


async def test_closing_ends_the_threads_but_only_after_their_copies(pools: Pools, gate: Gate) -> None:
    before = own_threads()
    engine = engine_of(inline_bytes_max=0, threads=2)
    transfer = engine.submit(pools.plan("write/1", range(CAPACITY)))
    assert len(own_threads()) == len(before) + 2
    closing = asyncio.ensure_future(engine.close())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not closing.done()
    gate.let(LAYERS)
    await closing
    assert transfer.done()
    assert own_threads() == before


async def test_an_engine_with_small_transfers_only_starts_no_thread(pools: Pools) -> None:
    before = own_threads()
    engine = engine_of()
    await engine.submit(pools.plan("write/1", [0]))
    assert own_threads() == before
    await engine.close()


@pytest.mark.parametrize("inline_bytes_max", [0, 2**30])
async def test_the_number_of_events_does_not_grow_with_the_pages(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, inline_bytes_max: int
) -> None:
    engine = engine_of(inline_bytes_max=inline_bytes_max)
    counts = []
    for slots in (range(0, 2, 2), range(0, CAPACITY, 2)):
        with monkeypatch.context() as patch:
            turns = Turns(patch)
            await engine.submit(pools.plan("write/1", slots))
            counts.append((turns.soon, turns.from_threads))
    assert counts[0] == counts[1]
    assert sum(counts[0]) <= 3
    await engine.close()


@pytest.mark.parametrize("inline_bytes_max", [0, 2**30])
async def test_pages_are_moved_by_one_call_for_each_layer_and_run_by_run(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, inline_bytes_max: int
) -> None:
    moved: list[tuple[int, int]] = []

    def move(planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        moved.append((len(planes), len(pieces)))

    stand_in(monkeypatch, move)
    engine = engine_of(inline_bytes_max=inline_bytes_max)
    await engine.submit(pools.plan("write/1", [0, 1, 2, 3, 10, 11, 20], [30, 31, 32, 33, 40, 41, 20]))
    assert moved == [(1, 3)] * LAYERS
    await engine.close()


async def test_many_small_transfers_settle_in_one_event(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    with monkeypatch.context() as patch:
        turns = Turns(patch)
        transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(50)]
        assert (turns.soon, turns.from_threads) == (1, 0)
    await asyncio.gather(*transfers)
    await engine.close()


async def test_ends_that_come_while_the_loop_is_busy_wake_it_once(
    pools: Pools, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(inline_bytes_max=0)
    with monkeypatch.context() as patch:
        turns = Turns(patch)
        transfers = [engine.submit(pools.plan(f"write/{slot}", [slot])) for slot in range(50)]
        gate.let(50 * LAYERS)
        gate.wait_moved(50 * LAYERS)
        await asyncio.gather(*transfers)
        # The last piece is moved a moment before its transfer is marked copied: that one may need its own wake.
        assert 1 <= turns.from_threads <= 2
    await engine.close()


async def test_a_failed_transfer_counts_as_failed_and_not_as_bytes(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(planes: Sequence[PlanePair], pieces: Sequence[Piece]) -> None:
        raise OSError("bus error")

    engine = engine_of()
    stand_in(monkeypatch, broken)
    with pytest.raises(TransferFailed, match="OSError: bus error"):
        await engine.submit(pools.plan("write/1", [0]))
    out = engine.statistics().device_to_host
    assert (out.transfers, out.failed, out.copied_bytes, out.runs) == (1, 1, 0, 0)
    await engine.close()


async def test_an_engine_without_threads_is_refused() -> None:
    with pytest.raises(UsageError):
        engine_of(threads=0)
