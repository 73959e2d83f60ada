"""A rank for tests: the production machine in the smallest shell that can talk, and waits for events only."""

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

from kvcoord.domain import OperationKind, Reason
from kvcoord.errors import FrameError
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.effects import Activated, Apply, Attach, LogWanted, RankEffect, SendUp
from kvcoord.protocol.messages import FromRank, StatusReply, Vote
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine
from kvcoord.runtime.alarm import Alarm
from kvcoord.transport.link import Connection, LinkLimits, Transport

_INCARNATIONS = itertools.count(1)

POOLS: dict[str, str | int] = {"pools": "kv"}

PATIENT = RankLimits(heartbeat_timeout_s=300.0, join_timeout_s=300.0, group_deadline_s=300.0)
"""Longer than any test, so that nobody is lost because the machine has stood still."""


class RankShell:
    """One member of a group. `effects` holds what its owner would be told, in order."""

    def __init__(
        self,
        transport: Transport,
        addresses: list[str],
        rank: int,
        world_size: int,
        *,
        group: str = "g",
        fingerprint: dict[str, str | int] | None = None,
        lockstep: bool = False,
        limits: RankLimits | None = None,
    ) -> None:
        identity = Identity(
            group=group,
            rank=rank,
            world_size=world_size,
            incarnation=next(_INCARNATIONS),
            fingerprint=POOLS if fingerprint is None else fingerprint,
        )
        self.machine = RankMachine(identity, len(addresses), 1, limits or PATIENT, lambda: [8, 9], lockstep=lockstep)
        self.effects: list[RankEffect] = []
        self.statuses: list[StatusReply] = []
        self._transport = transport
        self._addresses = addresses
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, lambda: self._perform(self.machine.tick(self._loop.time())))
        self._decoder = coordinator_decoder()
        self._attached = 0
        self._connection: Connection | None = None
        self._waiting: list[bytes] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RankShell":
        self._perform(self.machine.start(self._loop.time()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """The process is gone: nothing is said, what was queued is lost."""
        self._alarm.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._connection is not None:
            await self._connection.close(0)
            self._connection = None

    async def leave(self) -> None:
        """Ends membership in good order."""
        self._perform(self.machine.leave(self._loop.time()))
        assert self._connection is not None
        await self._connection.close()
        self._connection = None
        self._alarm.close()

    def vote(self, operation: str, *, yes: bool = True, kind: OperationKind = OperationKind.CUSTOM) -> None:
        vote = Vote(operation, kind, yes, reason=None if yes else Reason.HOST_FULL, shortfall={} if yes else {"kv": 3})
        self._perform(self.machine.vote(vote, self._loop.time()))

    def frame(self, step: int, digest: int = 0, free: list[int] | None = None) -> None:
        self._perform(self.machine.frame(step, free or [8, 9], digest, self._loop.time()))

    def send(self, payload: bytes) -> None:
        """Any bytes, past the machine."""
        if self._connection is not None and self._connection.connected:
            self._connection.send(payload)
        else:
            self._waiting.append(payload)

    def say(self, message: FromRank) -> None:
        """Any message, past the machine."""
        self.send(encode(message))

    async def active(self) -> None:
        await self.until(lambda: any(isinstance(effect, Activated) for effect in self.effects) and self.machine.active)

    async def applied(self, operation: str) -> Apply:
        """The first entry about this operation."""
        await self.until(lambda: self.has_applied(operation))
        entries = [effect for effect in self.effects if isinstance(effect, Apply)]
        return next(effect for effect in entries if effect.entry.operation == operation)

    def has_applied(self, operation: str) -> bool:
        return any(isinstance(effect, Apply) and effect.entry.operation == operation for effect in self.effects)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; it is looked at after each change."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _perform(self, effects: list[RankEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendUp):
                self.send(encode(effect.message))
            elif isinstance(effect, Attach):
                self._attach(effect.index)
            elif isinstance(effect, LogWanted):
                self._perform(self.machine.log(effect.round, [(f"event of rank {self.machine.identity.rank}", 1)]))
            else:
                self.effects.append(effect)
        self._alarm.set(self.machine.deadline())
        self._changed.set()

    def _attach(self, index: int) -> None:
        self._attached += 1
        self._waiting.clear()
        former, self._connection = self._connection, None
        task = self._loop.create_task(self._open(self._addresses[index], self._attached, former))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, address: str, attached: int, former: Connection | None) -> None:
        if former is not None:
            await former.close(0)
        who = self.machine.identity
        connection = await self._transport.open_connection(
            address,
            f"{who.group}/{who.rank}/{who.incarnation}/{attached}".encode(),
            on_batch=partial(self._take, attached),
            on_connected=self._say_what_waits,
            on_lost=lambda cause: None,
            limits=LinkLimits(message_bytes_max=8 << 20, queue_bytes_max=16 << 20),
        )
        self._connection = connection
        if connection.connected:
            self._say_what_waits()

    def _say_what_waits(self) -> None:
        if self._connection is not None:
            waiting, self._waiting = self._waiting, []
            for payload in waiting:
                self._connection.send(payload)

    def _take(self, attached: int, batch: list[bytes]) -> None:
        if attached != self._attached:
            return
        for payload in batch:
            try:
                message = self._decoder.decode(payload)
            except FrameError as error:
                raise AssertionError("a coordinator sends only messages") from error
            if isinstance(message, StatusReply):
                self.statuses.append(message)
                self._changed.set()
            else:
                self._perform(self.machine.receive(message, self._loop.time()))
