"""Keeps a process running as a service manager would: one that ends by itself is started again, the same way."""

from collections.abc import Awaitable, Callable

from kvcoord.runtime.children import Child, Children

Start = Callable[[], Awaitable[Child]]
"""Starts the process anew; returns once it serves."""

Died = Callable[[Child], Awaitable[None]]
"""Is told of each life that ended without having been asked to."""


class Kept:
    """One process. `child` is its present life, `lost` how often one ended without having been asked to.

    `start` None: it is not started again.
    """

    def __init__(self, child: Child, start: Start | None, children: Children, died: Died | None = None) -> None:
        self.child = child
        self.lost = 0
        self._start = start
        self._children = children
        self._died = died

    async def run(self) -> None:
        """Until it has ended and is not started again. Raises what starting it anew raises."""
        while True:
            await self.child.wait()
            if self.child.ending:
                return
            self.lost += 1
            if self._died is not None:
                await self._died(self.child)
            if self._start is None:
                return
            self._children.forget(self.child)
            self.child = await self._start()
