"""The event loop of a group member inside an engine: its machine, its connection, its deadlines, its heartbeats.

Everything here runs on the member's own thread. What the engine is told goes onto the board; what the engine says comes
in as calls that its thread has scheduled. With `embed_coordinator` rank 0 runs the coordinator on the same loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

from kvcoord.config.process import WorkerConfig
from kvcoord.domain import DivergencePolicy
from kvcoord.errors import Diverged, FrameError, GroupLost, InvariantBroken, JoinRefused, KvcoordError, TransferFailed
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.effects import (
    Activated,
    Apply,
    Attach,
    DivergenceSeen,
    GroupSuspended,
    JoinFailed,
    LogWanted,
    Lost,
    Note,
    RankEffect,
    SendUp,
    VerdictReady,
)
from kvcoord.protocol.messages import Ack, Decision, Entry, Vote
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine
from kvcoord.runtime.alarm import Alarm
from kvcoord.runtime.board import Board
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.runtime.serving import embedded_coordinator, rank_transport
from kvcoord.runtime.uplink import Uplink, link_limits

log = logging.getLogger(__name__)

EventLog = Callable[[], list[tuple[str, int]]]
"""Asked for the last applied events of this rank, each with the digest after it."""

_INCARNATION_BYTES: Final = 7


class MemberLoop:
    """One membership. Made, opened and closed on the loop that it lives on."""

    def __init__(
        self,
        config: WorkerConfig,
        fingerprint: dict[str, str | int],
        free: Sequence[int],
        events: EventLog,
        board: Board,
    ) -> None:
        self._config = config
        self._board = board
        self._events = events
        self._free = list(free)
        self._loop = asyncio.get_running_loop()
        self._incarnation = int.from_bytes(os.urandom(_INCARNATION_BYTES), "little")
        self._decoder = coordinator_decoder(config.limits.message_bytes_max)
        self._alarm = Alarm(self._loop, self._rang)
        self._coordinator: Coordinator | None = None
        self._begun = False
        self._uplink = Uplink(
            config,
            rank_transport(config),
            link_limits(config),
            self._heard,
            on_lost=lambda: self._perform(self.machine.gone(self._loop.time())),
            on_absent=lambda: self._perform(self.machine.absent(self._loop.time())),
        )
        identity = Identity(
            group=config.group.name,
            rank=config.rank,
            world_size=config.group.world_size,
            incarnation=self._incarnation,
            fingerprint=fingerprint,
        )
        self.machine = RankMachine(
            identity,
            len(config.coordinators),
            config.group.lag,
            _rank_limits(config),
            lambda: self._free,
            lockstep=True,
        )

    async def open(self) -> None:
        """Begins to join. Raises ConfigError when the embedded coordinator cannot serve at its address."""
        if self._config.embed_coordinator and self._config.rank == 0:
            self._coordinator = Coordinator(embedded_coordinator(self._config))
            self._coordinator.failure.add_done_callback(self._coordinator_failed)
            await self._coordinator.open()
        self._perform(self.machine.start(self._loop.time()))

    async def close(self) -> None:
        """Leaves in good order. An embedded coordinator goes last."""
        self._perform(self.machine.leave(self._loop.time()))
        self._alarm.close()
        await self._uplink.close()
        if self._coordinator is not None:
            await self._coordinator.close()

    # --- what the engine says -------------------------------------------------------------------------------------

    def frame(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None:
        """All that the engine has to say at this step."""
        now = self._loop.time()
        machine = self.machine
        self._free = free
        try:
            for vote in votes:
                machine.defer(vote)
            for ack in acks:
                machine.ack(ack, now)
            self._perform(machine.frame(step, free, digest, now))
        except KvcoordError as error:
            self._board.fail(error)

    def vote(self, vote: Vote) -> None:
        """A vote that is sent at once."""
        known = self.machine.decided(vote.operation)
        if known is not None:
            self._board.post_decision(known)
            return
        self._perform(self.machine.vote(vote, self._loop.time()))

    # --- what is heard --------------------------------------------------------------------------------------------

    def _heard(self, batch: list[bytes]) -> None:
        now = self._loop.time()
        for payload in batch:
            try:
                message = self._decoder.decode(payload)
            except FrameError as error:
                log.warning("message from coordinator dropped: %s", error)
                continue
            self._perform(self.machine.receive(message, now))

    def _rang(self) -> None:
        self._perform(self.machine.tick(self._loop.time()))

    def _coordinator_failed(self, failure: asyncio.Future[None]) -> None:
        error = None if failure.cancelled() else failure.exception()
        if error is not None:
            self._board.fail(error if isinstance(error, KvcoordError) else InvariantBroken("coordinator", repr(error)))

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[RankEffect]) -> None:
        board = self._board
        for effect in effects:
            if isinstance(effect, SendUp):
                self._uplink.send(encode(effect.message))
            elif isinstance(effect, VerdictReady):
                verdict = self.machine.rounds.verdict(effect.round)
                if verdict is not None:
                    board.post_verdict(verdict)
            elif isinstance(effect, Apply):
                self._applied(effect.entry)
            elif isinstance(effect, Attach):
                self._uplink.attach(effect.index, self._incarnation)
            elif isinstance(effect, Activated):
                self._activated(effect)
            elif isinstance(effect, LogWanted):
                self._perform(self.machine.log(effect.round, self._events()))
            else:
                self._told(effect)
        self._alarm.set(self.machine.deadline())

    def _applied(self, entry: Entry) -> None:
        if isinstance(entry, Decision):
            self._board.post_decision(entry)
        elif not entry.ok:
            cause = f"{entry.reason} on rank {entry.rank}"
            self._board.fail(TransferFailed(entry.operation, -1, cause))

    def _activated(self, effect: Activated) -> None:
        """An engine begins once: a later beginning means that another rank has lost its state, and ours is void."""
        if not effect.fresh:
            log.info("group %s works again", self._config.group.name)
        elif self._begun:
            cause = "another rank has begun a new life: this engine's cache no longer fits, start all ranks together"
            self._board.fail(GroupLost(self._config.group.name, cause, 0.0))
        else:
            self._begun = True
            self._board.begin(effect.activate.capacity)

    def _told(self, effect: JoinFailed | Lost | DivergenceSeen | GroupSuspended | Note) -> None:
        group = self._config.group
        if isinstance(effect, JoinFailed):
            rank = self._config.rank
            values = (effect.field, rank, effect.value, effect.other_rank, effect.other_value)
            self._board.fail(JoinRefused(group.name, effect.reason, *values))
        elif isinstance(effect, Lost):
            self._board.fail(GroupLost(group.name, effect.cause, effect.waited_s))
        elif isinstance(effect, DivergenceSeen):
            error = Diverged(group.name, effect.round, effect.sides, effect.operation)
            log.error("%s", error)
            if group.divergence is DivergencePolicy.STOP:
                self._board.fail(error)
        elif isinstance(effect, GroupSuspended):
            log.warning("group %s suspended: %s", group.name, effect.cause)
        else:
            log.info("%s %s %s", effect.kind, effect.operation, effect.detail)


def _rank_limits(config: WorkerConfig) -> RankLimits:
    timeouts = config.timeouts
    return RankLimits(
        heartbeat_interval_s=timeouts.heartbeat_interval_s,
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        gather_timeout_s=timeouts.gather_timeout_s,
        join_timeout_s=timeouts.join_timeout_s,
        group_deadline_s=timeouts.group_deadline_s,
        decisions_kept_max=config.limits.decisions_kept_max,
    )
