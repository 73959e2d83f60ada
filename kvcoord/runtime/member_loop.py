"""The event loop of a group member inside an engine: its machine, its connection, its deadlines, its heartbeats.

Two threads come in here, one at a time: each holds the guard while it steps the machine and performs what follows. The
member's own thread runs the event loop, and so everything that has to do with time and with connecting. The engine's
thread sends what it has to say by itself where the link allows that, and reads the link itself while it waits for an
answer (`ask`, `borrow`): a decision then needs no other thread of its process. Over ZeroMQ, whose sockets belong to one
thread, what the engine says is a call on the event loop. What the engine is told goes onto the board either way.

With `embed_coordinator` rank 0 runs the coordinator on the same loop.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVarTuple

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
from kvcoord.protocol.messages import Ack, Alive, Decision, Entry, Numbered, Verdict, Vote
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine
from kvcoord.runtime.alarm import Alarm
from kvcoord.runtime.board import Board
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.runtime.serving import embedded_coordinator, rank_transport
from kvcoord.runtime.uplink import Uplink, link_limits
from kvcoord.transport.node_connection import NodeConnection

log = logging.getLogger(__name__)

EventLog = Callable[[], list[tuple[str, int]]]
"""Asked for the last applied events of this rank, each with the digest after it."""

Arguments = TypeVarTuple("Arguments")

_INCARNATION_BYTES: Final = 7

_STEADY: Final = frozenset({Numbered, Verdict, Alive})
"""Messages of a group that works. None of them brings a deadline forward."""

_now = time.monotonic
"""Of both threads: a loop's own clock stands still while it sleeps."""


class MemberLoop:
    """One membership. Made, opened and closed on the loop that it lives on.

    `send`, `ask` and `borrow` are for the engine's thread.
    """

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
        self._thread = threading.get_ident()
        self._guard = threading.RLock()
        self._handed_over = 0
        """What the engine has said and the event loop has not come to yet."""
        self._incarnation = int.from_bytes(os.urandom(_INCARNATION_BYTES), "little")
        self._decoder = coordinator_decoder(config.limits.message_bytes_max)
        self._alarm = Alarm(self._loop, self._rang)
        self._coordinator: Coordinator | None = None
        self._begun = False
        self._suspended = ""
        """Why the group was suspended last."""
        self._uplink = Uplink(
            config,
            rank_transport(config, self._guard),
            link_limits(config),
            self._heard,
            on_lost=lambda: self._perform(self.machine.gone(_now())),
            on_absent=lambda: self._perform(self.machine.absent(_now())),
            guard=self._guard,
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
        with self._guard:
            self._perform(self.machine.start(_now()))

    async def close(self) -> None:
        """Leaves in good order; whoever still waits is told. An embedded coordinator goes last."""
        with self._guard:
            self._perform(self.machine.leave(_now()))
            self.fail(GroupLost(self._config.group.name, "this member was closed", 0.0))
        self._alarm.close()
        await self._uplink.close()
        if self._coordinator is not None:
            await self._coordinator.close()

    # --- the engine's thread --------------------------------------------------------------------------------------

    def send(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None:
        """The frame of this step: at once on the calling thread where the link allows that, else on the event loop."""
        with self._guard:
            if self._handed_over == 0 and self._uplink.shared:
                self._frame(step, free, digest, votes, acks)
            else:
                self._hand_over(self._frame, step, free, digest, votes, acks)

    def borrow(self) -> NodeConnection | None:
        """The link, for the calling thread to `pump` until it gives it back; None where it cannot be read by it.

        The event loop's thread sleeps meanwhile. It wakes the caller when it gives the connection up.
        """
        with self._guard:
            link = self._uplink.direct
            return link if link is not None and link.borrow() else None

    def ask(self, vote: Vote) -> NodeConnection | None:
        """Puts a vote that is sent at once, and borrows the link first: its answer then wakes nobody else.

        None where it cannot be borrowed. Where the calling thread may not even send, the event loop does.
        """
        with self._guard:
            link = None if self._handed_over else self.borrow()
            if link is not None:
                try:
                    self._vote(vote)
                except BaseException:
                    link.give_back()
                    raise
            elif self._handed_over == 0 and self._uplink.shared:
                self._vote(vote)
            else:
                self._hand_over(self._vote, vote)
            return link

    def _hand_over(self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        self._handed_over += 1
        self._loop.call_soon_threadsafe(self._take_over, act, *arguments)

    def _take_over(self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        with self._guard:
            self._handed_over -= 1
            act(*arguments)

    # --- what the engine says -------------------------------------------------------------------------------------

    def _frame(self, step: int, free: list[int], digest: int, votes: list[Vote], acks: list[Ack]) -> None:
        """All that the engine has to say at this step."""
        now = _now()
        machine = self.machine
        self._free = free
        try:
            for vote in votes:
                machine.defer(vote)
            for ack in acks:
                machine.ack(ack, now)
            self._carry_out(machine.frame(step, free, digest, now))
        except KvcoordError as error:
            self.fail(error)

    def _vote(self, vote: Vote) -> None:
        """A vote that is sent at once."""
        known = self.machine.decided(vote.operation)
        if known is not None:
            self._board.post_decision(known)
            return
        self._carry_out(self.machine.vote(vote, _now()))

    # --- what is heard --------------------------------------------------------------------------------------------

    def _heard(self, batch: list[bytes]) -> None:
        """On the thread that has read it."""
        now = _now()
        steady = True
        for payload in batch:
            try:
                message = self._decoder.decode(payload)
            except FrameError as error:
                log.warning("message from coordinator dropped: %s", error)
                continue
            try:
                self._carry_out(self.machine.receive(message, now))
            except Exception as error:
                log.error("the member stops", exc_info=error)
                self.fail(as_known(error))
                return
            steady = steady and type(message) in _STEADY
        if steady:
            return
        if threading.get_ident() == self._thread:
            self._watch_deadline()
        else:
            self._loop.call_soon_threadsafe(self._watch_deadline)

    def _rang(self) -> None:
        with self._guard:
            self._perform(self.machine.tick(_now()))

    def _watch_deadline(self) -> None:
        with self._guard:
            self._alarm.set(self.machine.deadline())

    def _coordinator_failed(self, failure: asyncio.Future[None]) -> None:
        error = None if failure.cancelled() else failure.exception()
        if error is not None:
            self.fail(error if isinstance(error, KvcoordError) else InvariantBroken("coordinator", repr(error)))

    def fail(self, error: KvcoordError) -> None:
        """The membership is over. An engine that reads the link itself is woken."""
        with self._guard:
            self._board.fail(error)
            link = self._uplink.direct
            if link is not None and threading.get_ident() == self._thread:
                link.interrupt()

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[RankEffect]) -> None:
        """On the event loop's thread: what was done may have moved a deadline."""
        self._carry_out(effects)
        self._alarm.set(self.machine.deadline())

    def _carry_out(self, effects: list[RankEffect]) -> None:
        board = self._board
        for effect in effects:
            if type(effect) is SendUp:
                self._uplink.send(encode(effect.message))
            elif type(effect) is VerdictReady:
                verdict = self.machine.rounds.verdict(effect.round)
                if verdict is not None:
                    board.post_verdict(verdict)
            elif type(effect) is Apply:
                self._applied(effect.entry)
            elif isinstance(effect, Attach):
                self._uplink.attach(effect.index, self._incarnation)
            elif isinstance(effect, Activated):
                self._activated(effect)
            elif isinstance(effect, LogWanted):
                self._carry_out(self.machine.log(effect.round, self._events()))
            else:
                self._told(effect)

    def _applied(self, entry: Entry) -> None:
        if isinstance(entry, Decision):
            self._board.post_decision(entry)
        elif not entry.ok:
            cause = f"{entry.reason} on rank {entry.rank}"
            self.fail(TransferFailed(entry.operation, -1, cause))

    def _activated(self, effect: Activated) -> None:
        """An engine begins once: a later beginning means that another rank has lost its state, and ours is void."""
        if not effect.fresh:
            log.info("group %s works again", self._config.group.name)
        elif self._begun:
            cause = "another rank has begun a new life: this engine's cache no longer fits, start all ranks together"
            self.fail(GroupLost(self._config.group.name, cause, 0.0))
        else:
            self._begun = True
            self._board.begin(effect.activate.capacity)

    def _told(self, effect: JoinFailed | Lost | DivergenceSeen | GroupSuspended | Note) -> None:
        group = self._config.group
        if isinstance(effect, JoinFailed):
            rank = self._config.rank
            values = (effect.field, rank, effect.value, effect.other_rank, effect.other_value)
            self.fail(JoinRefused(group.name, effect.reason, *values))
        elif isinstance(effect, Lost):
            # Who was lost first explains more than what is still missing at the end.
            causes = dict.fromkeys(cause for cause in (self._suspended, effect.cause) if cause)
            self.fail(GroupLost(group.name, "; ".join(causes), effect.waited_s))
        elif isinstance(effect, DivergenceSeen):
            error = Diverged(group.name, effect.round, effect.sides, effect.operation)
            log.error("%s", error)
            if group.divergence is DivergencePolicy.STOP:
                self.fail(error)
        elif isinstance(effect, GroupSuspended):
            embedded = effect.rank < 0 and self._config.embed_coordinator
            self._suspended = f"{effect.cause} (rank 0 embeds it)" if embedded else effect.cause
            log.warning("group %s suspended: %s", group.name, self._suspended)
        else:
            log.info("%s %s %s", effect.kind, effect.operation, effect.detail)


def as_known(error: Exception) -> KvcoordError:
    """What the engine raises for an error that nobody foresaw."""
    return error if isinstance(error, KvcoordError) else InvariantBroken("a group member goes on", repr(error))


def _rank_limits(config: WorkerConfig) -> RankLimits:
    timeouts = config.timeouts
    return RankLimits(
        heartbeat_interval_s=timeouts.heartbeat_interval_s,
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        gather_timeout_s=timeouts.gather_timeout_s,
        join_timeout_s=timeouts.join_timeout_s,
        group_deadline_s=timeouts.group_deadline_s,
        decisions_kept_max=config.limits.decisions_kept_max,
        report_bytes_max=config.limits.report_bytes_max,
    )
