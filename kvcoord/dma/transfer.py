"""The awaitable future of one copy: many pages over all layers of their pools.

It does not copy and does not know who does: an engine tells it what has landed. All of it happens on one loop's
thread. Awaiters only look on: cancelling one, or all, never touches the copy.
"""

import asyncio
import warnings
from collections.abc import Callable, Generator
from typing import Any

from kvcoord.errors import InvariantBroken, TransferFailed, UsageError


class Transfer:
    """One copy under way. `await transfer` ends when every page of every layer has landed.

    The side of the engine is `land` and `settle`; everything else is for whoever asked for the copy.
    Dropped before it is settled, it emits a ResourceWarning with its name.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_layers_awaited",
        "_layers_landed",
        "_loop",
        "_settled",
        "_waiters",
        "layer_count",
        "name",
    )

    def __init__(self, name: str, layer_count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._settled = False
        self.name = name
        self.layer_count = layer_count
        self._loop = loop
        self._layers_landed = 0
        self._layers_awaited = False
        self._error: TransferFailed | None = None
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._callbacks: list[Callable[[Transfer], object]] = []

    @property
    def layers_landed(self) -> int:
        """How many layers, from the first, are known to have landed: 0 to `layer_count`.

        While nobody awaits a layer an engine may leave this behind and catch up when it settles.
        """
        return self._layers_landed

    @property
    def layers_awaited(self) -> bool:
        """Has anybody asked for a single layer? If not, an engine may spare itself `land`."""
        return self._layers_awaited

    @property
    def failed(self) -> TransferFailed | None:
        """Why it failed, once it has. Nobody is obliged to look."""
        return self._error

    def done(self) -> bool:
        """Is the copy over, one way or the other?"""
        return self._settled

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for all layers. Raises TransferFailed, a new one for each awaiter."""
        return self._reach(self.layer_count + 1).__await__()

    async def layer(self, index: int) -> None:
        """Wait until layer `index` has landed in every pool that has it.

        Raises TransferFailed when the copy failed before that layer, UsageError when there is no such layer.
        """
        if not 0 <= index < self.layer_count:
            raise UsageError("layer", index, f"transfer {self.name} has layers 0 to {self.layer_count - 1}")
        self._layers_awaited = True
        await self._reach(index + 1)

    def add_done_callback(self, callback: "Callable[[Transfer], object]") -> None:
        """Have the loop call `callback(transfer)` exactly once, after it has settled; soon, if it has already."""
        if self._settled:
            self._loop.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def land(self, layer_count: int) -> None:
        """Engine: the first `layer_count` layers have landed. Raises InvariantBroken when that goes back."""
        if self._settled or not self._layers_landed <= layer_count <= self.layer_count:
            raise InvariantBroken("a transfer's layers land in order, before it settles", f"{self} to {layer_count}")
        self._layers_landed = layer_count
        if self._waiters:
            self._wake(layer_count)

    def settle(self, error: TransferFailed | None = None) -> None:
        """Engine: the copy is over. Without `error` all layers have landed. Raises InvariantBroken the second time."""
        if self._settled:
            raise InvariantBroken("a transfer settles once", f"{self} settled again with {error}")
        self._settled = True
        self._error = error
        if error is None:
            self._layers_landed = self.layer_count
        self._wake(self.layer_count + 1)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._loop.call_soon(callback, self)

    async def _reach(self, layers_needed: int) -> None:
        if not self._settled and self._layers_landed < layers_needed:
            waiter = self._loop.create_future()
            self._waiters[waiter] = layers_needed
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)
        if self._error is not None and self._layers_landed < layers_needed:
            raise TransferFailed(self._error.transfer, self._error.layer, self._error.cause)

    def _wake(self, layer_count: int) -> None:
        ready = [waiter for waiter, layers_needed in self._waiters.items() if layers_needed <= layer_count]
        for waiter in ready:
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._settled else "open"
        return f"<Transfer {self.name} {state}, {self._layers_landed} of {self.layer_count} layers>"

    def __del__(self) -> None:
        if not self._settled:
            warnings.warn(f"{self!r} was dropped before it settled", ResourceWarning, stacklevel=1, source=self)
