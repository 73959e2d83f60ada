import asyncio
from collections.abc import AsyncIterator

import pytest

from kvcoord.dma.cpu import CpuCopyEngine
from kvcoord.dma.engine import CopyPlan, Direction, PoolCopy
from kvcoord.dma.faults import CopyFaults, FaultyCopyEngine
from kvcoord.errors import TransferFailed, UsageError
from tests.dma.gate import Gate
from tests.dma.pools import LAYERS, Pools


def faulty(faults: CopyFaults) -> FaultyCopyEngine:
    loop = asyncio.get_running_loop()
    return FaultyCopyEngine(loop, CpuCopyEngine(loop), faults)


@pytest.fixture
async def engine() -> AsyncIterator[FaultyCopyEngine]:
    engine = faulty(CopyFaults())
    yield engine
    await engine.close()


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_held_transfer_moves_nothing_and_keeps_its_direction_back(
    engine: FaultyCopyEngine, pools: Pools
) -> None:
    engine.hold("write/1")
    held, behind = engine.submit(pools.plan("write/1", [0])), engine.submit(pools.plan("write/2", [1]))
    other_way = PoolCopy(pools.host, pools.device, [9], [9])
    await engine.submit(CopyPlan("load/1", Direction.HOST_TO_DEVICE, (other_way,)))
    await turn()
    assert not held.done()
    assert not behind.done()
    assert held.layers_landed == 0
    pools.expect_host([])
    engine.let_go("write/1")
    await behind
    assert held.done()
    pools.expect_host([(0, 0), (1, 1)])


async def test_closing_waits_for_a_held_transfer(engine: FaultyCopyEngine, pools: Pools) -> None:
    engine.hold("write/1")
    transfer = engine.submit(pools.plan("write/1", [0]))
    closing = asyncio.ensure_future(engine.close())
    await turn()
    assert not closing.done()
    engine.let_go("write/1")
    await closing
    assert transfer.done()


async def test_a_name_let_go_is_no_longer_held(engine: FaultyCopyEngine, pools: Pools) -> None:
    engine.hold("write/1")
    engine.let_go("write/1")
    await engine.submit(pools.plan("write/1", [0]))
    with pytest.raises(UsageError):
        engine.let_go("write/1")


async def test_memory_closed_behind_a_held_transfer_fails_it_and_not_the_engine(
    engine: FaultyCopyEngine, pools: Pools
) -> None:
    other = Pools()
    engine.hold("write/1")
    lost = engine.submit(other.plan("write/1", [0]))
    good = engine.submit(pools.plan("write/2", [0]))
    other.host.close()
    engine.let_go("write/1")
    with pytest.raises(TransferFailed, match="closed"):
        await lost
    await good


@pytest.mark.parametrize("fail_at_layer", [0, LAYERS, LAYERS + 5])
async def test_a_failure_on_purpose_comes_only_after_the_bytes_are_at_rest(
    pools: Pools, gate: Gate, fail_at_layer: int
) -> None:
    loop = asyncio.get_running_loop()
    faults = CopyFaults(fail_at_layer={"write/bad": fail_at_layer})
    engine = FaultyCopyEngine(loop, CpuCopyEngine(loop, inline_bytes_max=0), faults)
    bad = engine.submit(pools.plan("write/bad", [0]))
    await turn()
    gate.let(LAYERS - 1)
    gate.wait_moved(LAYERS - 1)
    await turn()
    assert not bad.done()
    gate.let(1)
    with pytest.raises(TransferFailed, match="on purpose"):
        await bad
    assert bad.layers_landed == min(fail_at_layer, LAYERS)
    assert engine.statistics().device_to_host.transfers == 1
    await engine.close()


async def test_delays_repeat_with_their_seed(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    async def delays(seed: int) -> list[float]:
        slept: list[float] = []

        async def note(delay_s: float) -> None:
            slept.append(delay_s)

        engine = faulty(CopyFaults(delay_s=2.0, delay_random_s=0.5, seed=seed))
        with monkeypatch.context() as patch:
            patch.setattr("kvcoord.dma.faults.asyncio.sleep", note)
            for number in range(5):
                await engine.submit(pools.plan(f"write/{number}", [0]))
            await engine.close()
        return slept

    first = await delays(seed=1)
    assert first == await delays(seed=1) != await delays(seed=2)
    assert all(2.0 <= delay_s < 2.5 for delay_s in first)
    assert len(set(first)) == 5
