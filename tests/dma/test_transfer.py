import asyncio
import gc
import warnings
from collections.abc import AsyncIterator

import pytest

from kvcoord.dma.transfer import Transfer
from kvcoord.errors import InvariantBroken, TransferFailed, UsageError

FAILURE = TransferFailed("load/1", 2, "injected")


class Settled:
    """Makes transfers and settles at the end what a test left open."""

    def __init__(self) -> None:
        self.made: list[Transfer] = []

    def __call__(self, layer_count: int = 4) -> Transfer:
        self.made.append(Transfer("load/1", layer_count, asyncio.get_running_loop()))
        return self.made[-1]


@pytest.fixture
async def make() -> AsyncIterator[Settled]:
    settled = Settled()
    yield settled
    for transfer in settled.made:
        if not transfer.done():
            transfer.settle()


async def turn() -> None:
    """Let everything that is ready run."""
    for _ in range(4):
        await asyncio.sleep(0)


async def test_awaiting_ends_only_when_it_settles(make: Settled) -> None:
    transfer = make()
    waiting = asyncio.ensure_future(transfer)
    transfer.land(4)
    await turn()
    assert not waiting.done()
    transfer.settle()
    await waiting
    assert transfer.failed is None
    await transfer


async def test_a_layer_can_be_awaited_before_during_and_after_its_landing(make: Settled) -> None:
    transfer = make()
    waiting = [asyncio.ensure_future(transfer.layer(index)) for index in range(4)]
    await turn()
    for landed in (1, 3):
        transfer.land(landed)
        await turn()
        assert transfer.layers_landed == landed
        assert [future.done() for future in waiting] == [index < landed for index in range(4)]
    await transfer.layer(2)
    transfer.settle()
    await asyncio.gather(*waiting)
    assert transfer.layers_landed == 4
    await transfer.layer(3)


@pytest.mark.parametrize("index", [-1, 4])
async def test_a_layer_that_does_not_exist_is_a_usage_error(make: Settled, index: int) -> None:
    with pytest.raises(UsageError):
        await make().layer(index)


async def test_an_engine_is_told_whether_layers_are_awaited(make: Settled) -> None:
    transfer = make()
    waiting = asyncio.ensure_future(transfer)
    await turn()
    awaited = [transfer.layers_awaited]
    layer = asyncio.ensure_future(transfer.layer(0))
    await turn()
    assert [*awaited, transfer.layers_awaited] == [False, True]
    transfer.settle()
    await asyncio.gather(waiting, layer)


async def test_a_failure_reaches_every_awaiter_but_not_those_of_layers_that_landed(make: Settled) -> None:
    transfer = make()
    waiting = [asyncio.ensure_future(transfer) for _ in range(3)]
    layers = [asyncio.ensure_future(transfer.layer(index)) for index in range(4)]
    await turn()
    transfer.land(2)
    transfer.settle(FAILURE)
    results = await asyncio.gather(*waiting, *layers, return_exceptions=True)
    failures = [result for result in results if isinstance(result, TransferFailed)]
    assert results[3:5] == [None, None]
    assert len(failures) == 5
    assert len({id(failure) for failure in failures}) == 5
    assert {failure.args for failure in failures} == {FAILURE.args}
    assert transfer.failed is FAILURE
    await transfer.layer(1)
    for awaitable in (transfer, transfer.layer(2)):
        with pytest.raises(TransferFailed):
            await awaitable


async def test_a_failure_that_nobody_looks_at_makes_no_noise() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    transfer = Transfer("load/1", 4, asyncio.get_running_loop())
    transfer.settle(FAILURE)
    del transfer
    gc.collect()
    await turn()
    assert complaints == []


async def test_cancelling_an_awaiter_touches_neither_the_copy_nor_the_other_awaiters(make: Settled) -> None:
    transfer = make()
    leaves, stays = asyncio.ensure_future(transfer), asyncio.ensure_future(transfer)
    leaves_layer = asyncio.ensure_future(transfer.layer(3))
    await turn()
    leaves.cancel()
    leaves_layer.cancel()
    await turn()
    assert leaves.cancelled()
    assert leaves_layer.cancelled()
    assert not transfer.done()
    transfer.land(4)
    transfer.settle()
    await stays


async def test_an_awaiter_cancelled_in_the_turn_of_the_landing_does_no_harm(make: Settled) -> None:
    transfer = make()
    leaves, stays = asyncio.ensure_future(transfer), asyncio.ensure_future(transfer)
    await turn()
    leaves.cancel()
    transfer.settle()
    await stays
    assert leaves.cancelled()


async def test_awaiters_that_gave_up_are_not_kept(make: Settled) -> None:
    transfer = make()
    for _ in range(20):
        waiting = asyncio.ensure_future(transfer.layer(0))
        await turn()
        waiting.cancel()
        await turn()
    assert len(transfer._waiters) == 0


@pytest.mark.parametrize("error", [None, FAILURE])
async def test_callbacks_run_once_on_the_loop_and_never_inside_settle(
    make: Settled, error: TransferFailed | None
) -> None:
    transfer = make()
    called: list[Transfer] = []
    transfer.add_done_callback(called.append)
    await turn()
    transfer.settle(error)
    assert called == []
    await turn()
    assert called == [transfer]
    transfer.add_done_callback(called.append)
    assert called == [transfer]
    await turn()
    assert called == [transfer, transfer]


@pytest.mark.parametrize("error", [None, FAILURE])
async def test_settling_twice_breaks_an_invariant_and_changes_nothing(
    make: Settled, error: TransferFailed | None
) -> None:
    transfer = make()
    transfer.settle()
    with pytest.raises(InvariantBroken):
        transfer.settle(error)
    assert transfer.failed is None


async def test_layers_never_land_backwards_too_far_or_after_the_end(make: Settled) -> None:
    transfer = make()
    transfer.land(2)
    for layer_count in (1, 5):
        with pytest.raises(InvariantBroken):
            transfer.land(layer_count)
    assert transfer.layers_landed == 2
    transfer.settle()
    with pytest.raises(InvariantBroken):
        transfer.land(4)


async def test_a_transfer_dropped_unsettled_warns_with_its_name() -> None:
    transfer = Transfer("load/lost", 4, asyncio.get_running_loop())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del transfer
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert "load/lost" in str(caught[0].message)
