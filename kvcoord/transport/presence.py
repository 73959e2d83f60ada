"""Whether the peer of a connection is there, for those who wait until it is. Knows no transport."""

import asyncio

from kvcoord.errors import PeerUnavailable


class Presence:
    """Absent at first; `arrive` and `depart` may alternate; `close` is final."""

    def __init__(self, address: str, connect_timeout_s: float) -> None:
        self.present = False
        self.closed = False
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._cause = "nobody answers"
        self._changed = asyncio.Event()

    def arrive(self) -> None:
        """The peer is there."""
        self.present = True
        self._changed.set()

    def depart(self, cause: str) -> None:
        """The peer is gone, or was refused; `cause` is what those who wait in vain are told."""
        self.present = False
        self._cause = cause
        self._changed.clear()

    def close(self) -> None:
        """Nobody is waited for any more."""
        self.present = False
        self.closed = True
        self._cause = "the connection is closed"
        self._changed.set()

    async def wait(self) -> None:
        """Return when the peer is there. Raises `PeerUnavailable` after `connect_timeout_s` or when closed."""
        limit_s = self._connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError as error:
            cause = f"not connected within connect_timeout_s={limit_s:g} s: {self._cause}"
            raise PeerUnavailable(self._address, cause) from error
        if self.closed:
            raise PeerUnavailable(self._address, self._cause)
