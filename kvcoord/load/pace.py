"""When an engine may begin its next step: timestamps of the trace, random delays, the pipeline stage before it.

Blocks the calling thread, which stands in for an engine's scheduler thread. Knows nothing of the cache.
"""

import socket
import time
from collections.abc import Callable
from random import Random

from kvcoord.errors import PeerUnavailable

_STEP = b"\1"


class Pace:
    """One engine's. `speed_up` 0: no waiting for timestamps. `jitter_s`: every step begins up to this much late.

    `upstream` and `downstream` are joined to the stages before and after: a byte stands for the activations of a step.
    """

    def __init__(
        self,
        *,
        speed_up: float,
        jitter_s: float,
        seed: int,
        upstream: socket.socket | None,
        downstream: socket.socket | None,
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speed_up = speed_up
        self._jitter_s = jitter_s
        self._random = Random(seed)
        self._upstream = upstream
        self._downstream = downstream
        self._sleep = sleep
        self._clock = clock
        self._start_s = 0.0

    def start(self, at_s: float) -> None:
        """The moment 0 of the trace."""
        self._start_s = at_s

    def wait_for_request(self, timestamp_ms: int) -> None:
        """Returns when the request has arrived."""
        if self._speed_up:
            early_s = self._start_s + timestamp_ms / 1000 / self._speed_up - self._clock()
            if early_s > 0:
                self._sleep(early_s)

    def begin_step(self) -> None:
        """Returns when the stage before has finished this step. Raises PeerUnavailable when it has ended."""
        if self._upstream is not None and not self._upstream.recv(1):
            raise PeerUnavailable("pipeline stage before", "has ended")
        if self._jitter_s:
            self._sleep(self._random.random() * self._jitter_s)

    def end_step(self) -> None:
        """Hands on to the stage after. Raises PeerUnavailable when it has ended."""
        if self._downstream is None:
            return
        try:
            self._downstream.sendall(_STEP)
        except OSError as error:
            raise PeerUnavailable("pipeline stage after", "has ended") from error

    def close(self) -> None:
        for joined in (self._upstream, self._downstream):
            if joined is not None:
                joined.close()
