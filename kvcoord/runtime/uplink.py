"""A worker's connection to the coordinator it is attached to: one at a time, changed on the machine's order.

What a former connection still delivers is dropped: from the moment a rank says Hello to one coordinator it takes
nothing from another.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from kvcoord.config.process import WorkerConfig
from kvcoord.errors import KvcoordError
from kvcoord.transport.link import SENT, Connection, LinkLimits, Transport
from kvcoord.transport.node_connection import NodeConnection

log = logging.getLogger(__name__)

_SAME_ADDRESS = "start one there, by the same address: one at ipc:// is not found at unix://, nor the other way round"


def link_limits(config: WorkerConfig) -> LinkLimits:
    """The bounds of a rank's sockets."""
    limits, timeouts = config.limits, config.timeouts
    return LinkLimits(
        queue_messages_max=limits.queue_messages_max,
        queue_bytes_max=max(8 << 20, 2 * limits.message_bytes_max),
        message_bytes_max=limits.message_bytes_max,
        connect_timeout_s=timeouts.connect_timeout_s,
        linger_s=timeouts.linger_s,
    )


class Uplink:
    """Opens connections in the background; messages sent before one is open wait for it, up to `queue_messages_max`.

    `transport` None: a worker without a coordinator. `on_lost` is called when the connection broke, `on_absent` once
    for an attachment when none could be made. `guard` is held in every callback: another thread that holds it may call
    `send` while `shared`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        transport: Transport | None,
        limits: LinkLimits,
        on_batch: Callable[[list[bytes]], None],
        on_lost: Callable[[], None],
        on_absent: Callable[[], None],
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        self._config = config
        self._guard = threading.RLock() if guard is None else guard
        self._transport = transport
        self._limits = limits
        self._on_batch, self._on_lost, self._on_absent = on_batch, on_lost, on_absent
        self._missed = False
        self._attachment = 0
        self._connection: Connection | None = None
        self._connected = False
        self._waiting: list[bytes] = []
        self._held: list[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: dict[str, float] = {}
        """Since when an address has been tried, while none answers; infinity once that was told."""
        self.address = ""
        self.sends_refused = 0
        self.shared = True
        """Whether `send` is for any thread that holds the guard, and not only for the event loop's."""

    @property
    def direct(self) -> NodeConnection | None:
        """The connection, if another thread may read it."""
        return self._connection if isinstance(self._connection, NodeConnection) else None

    def attach(self, index: int, incarnation: int) -> None:
        """Leaves the present connection and connects to this coordinator of the list."""
        self.release()
        self._attachment += 1
        self.address = self._config.coordinators[index]
        self._waiting.clear()
        self._missed = False
        former, self._connection, self._connected = self._connection, None, False
        self.shared = True
        self._tell_unanswered()
        task = asyncio.get_running_loop().create_task(self._open(self.address, self._attachment, incarnation, former))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hold(self) -> None:
        """Keeps messages back until `release`: something else is to be sent before them."""
        self._held = []

    def release(self) -> None:
        """Sends what was kept back."""
        held, self._held = self._held, None
        for payload in held or ():
            self.send(payload)

    def send(self, payload: bytes) -> None:
        """Queues one message. What cannot be queued is counted; the machine says again what stays unanswered."""
        if self._held is not None:
            self._held.append(payload)
            return
        if self._connection is None or not self._connected:
            if len(self._waiting) < self._limits.queue_messages_max:
                self._waiting.append(payload)
            else:
                self.sends_refused += 1
        elif self._connection.send(payload) is not SENT:
            self.sends_refused += 1

    async def close(self) -> None:
        """Delivers what is queued for at most the linger time."""
        self._attachment += 1
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.linger_s)
        if self._connection is not None:
            await self._connection.close()

    async def _open(self, address: str, attachment: int, incarnation: int, former: Connection | None) -> None:
        if former is not None:
            await former.close(0)
        if self._transport is None or attachment != self._attachment:
            return
        identity = f"{self._config.group.name}/{self._config.rank}/{incarnation:x}/{attachment}"
        try:
            connection = await self._transport.open_connection(
                address,
                identity.encode(),
                on_batch=partial(self._take, attachment),
                on_connected=partial(self._ready, attachment),
                on_lost=partial(self._lost, attachment),
                limits=self._limits,
                on_absent=partial(self._absent, attachment),
            )
        except KvcoordError as error:
            log.error("coordinator %s: %s", address, error)
            return
        with self._guard:
            if attachment == self._attachment:
                self._connection = connection
                self.shared = isinstance(connection, NodeConnection)
                if connection.connected:
                    self._ready(attachment)
                return
        await connection.close(0)

    def _ready(self, attachment: int) -> None:
        with self._guard:
            if attachment != self._attachment or self._connection is None:
                return
            self._connected = True
            self._unanswered.clear()
            waiting, self._waiting = self._waiting, []
            for payload in waiting:
                self.send(payload)

    def _lost(self, attachment: int, cause: str) -> None:
        with self._guard:
            if attachment == self._attachment:
                self._connected = False
                log.warning("connection to coordinator %s lost: %s", self.address, cause)
                self._on_lost()

    def _absent(self, attachment: int) -> None:
        with self._guard:
            if attachment == self._attachment and not self._missed:
                self._missed = True
                self._on_absent()

    def _tell_unanswered(self) -> None:
        """Once for each address, when it has been tried for as long as a connection may take."""
        now = asyncio.get_running_loop().time()
        since = self._unanswered.setdefault(self.address, now)
        if now - since >= self._limits.connect_timeout_s:
            self._unanswered[self.address] = math.inf
            log.warning("no coordinator answers at %s; %s", self.address, _SAME_ADDRESS)

    def _take(self, attachment: int, batch: list[bytes]) -> None:
        with self._guard:
            if attachment == self._attachment:
                self._on_batch(batch)
