"""Keeps a process running as a service manager would: one that ends by itself is started again, the same way."""

from collections.abc import Awaitable, Callable

from kvcoord.runtime.children import Child, Children

Start = Callable[[], Awaitable[Child]]
"""Starts the process anew; returns once it serves."""


class Kept:
    """One process. `child` is its present life, `lost` how often one ended without having been asked to.

    `start` None: it is not started again.
    """

    def __init__(self, child: Child, start: Start | None, children: Children) -> None:
        self.child = child
        self.lost = 0
        self._start = start
        self._children = children

    async def run(self) -> None:
        """Until it has ended and is not started again. Raises what starting it anew raises."""
        while True:
            await self.child.wait()
            if self.child.ending:
                return
            self.lost += 1
            if self._start is None:
                return
            self._children.forget(self.child)
            self.child = await self._start()
