"""The worker process of one rank: performs what its machine decides, with real sockets, memory and copies.

It serves its engine on a local socket, is a member of its group through the coordinator's socket, owns the host memory
and maps the engine's device memory. An engine's life is one membership: when the engine goes, the worker leaves the
group and joins again, so that the next engine begins together with the others.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVarTuple

import msgspec

from kvcoord.config.process import WorkerConfig
from kvcoord.controller.assembly import make_worker
from kvcoord.controller.effects import MapHosts, Reply, StartCopy
from kvcoord.controller.worker import WorkerEffect, WorkerMachine
from kvcoord.dma.transfer import Transfer
from kvcoord.domain import OperationId, Reason
from kvcoord.errors import ConfigError, FrameError, JoinRefused, KvcoordError, UsageError
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.observability.snapshot import WorkerSnapshot
from kvcoord.protocol.codec import Decoder, coordinator_decoder, encode
from kvcoord.protocol.effects import Attach, Note, SendUp
from kvcoord.protocol.local import (
    LOCAL_VERSION,
    Acquired,
    Answer,
    Call,
    Failed,
    FromEngine,
    Landed,
    Loaded,
    Open,
    Opened,
    Register,
    Status,
    StatusBody,
    failed,
)
from kvcoord.runtime.alarm import Alarm
from kvcoord.runtime.copies import Copies
from kvcoord.runtime.dumps import Dumps
from kvcoord.runtime.recording import RankRecording
from kvcoord.runtime.sessions import NOBODY, Sessions
from kvcoord.runtime.uplink import Uplink, link_limits
from kvcoord.runtime.worker_status import worker_snapshot
from kvcoord.transport.link import Transport
from kvcoord.transport.unix import UnixTransport

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")

_ANSWERED_HERE: Final = frozenset({Open, Register, Status})
_STARTING_COPIES: Final = frozenset({Acquired, Loaded})
"""Asked of every call and answer: `isinstance` takes five times as long to say no to a struct."""

MakeMachine = Callable[[WorkerConfig, int], WorkerMachine]


class Worker:
    """One rank's worker. `local` serves the engine, `remote` reaches the coordinators.

    `ended` gets the error when the worker cannot go on: its join was refused, or its machine raised. `between_lives` is
    called when an engine is gone and nothing is left of its life but the host pages.
    """

    def __init__(
        self,
        config: WorkerConfig,
        local: UnixTransport,
        remote: Transport | None,
        recorder: FlightRecorder,
        make_machine: MakeMachine = make_worker,
        between_lives: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.dumps = Dumps(recorder, config.recorder_dir)
        self._recording = RankRecording(recorder)
        self._failure: Failed | None = None
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self.incarnation = 0
        self.ignored: dict[str, int] = {}
        self.calls = 0
        self._loop = asyncio.get_running_loop()
        self._local = local
        self._make_machine = make_machine
        self._between_lives = between_lives
        self._limits = link_limits(config)
        self._sessions = Sessions(self._limits, partial(self._ignore, "session_full"))
        self._alarm = Alarm(self._loop, self._rang)
        self._engine_decoder: Decoder[FromEngine] = Decoder(FromEngine, config.limits.message_bytes_max)
        self._decoder = coordinator_decoder(config.limits.message_bytes_max)
        self._engine_session = NOBODY
        self._model = ""
        self._transfers: dict[OperationId, Transfer | None] = {}
        """Copies under way; None for one that could not start."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._over = False
        """The engine of this membership is gone."""
        self.copies = Copies(config, self._loop, self._copy_ended)
        self.uplink = Uplink(config, remote, self._limits, self._heard, self._parted, self._unconnected)
        self.machine = self._new_machine()

    async def open(self) -> None:
        """Serves the engine and joins the group. Raises ConfigError when an address or a GPU cannot be used."""
        await self.copies.open()
        self.machine.host.reached_by(self.copies.reach)
        await self._sessions.open(self._local, self.config.listen, self._asked, self._lost)
        self._perform(self.machine.start(self._loop.time()))
        self._flush()

    async def close(self) -> None:
        """Leaves the group in good order, lets copies end, and closes every socket and map."""
        self._leaving = True
        self._perform(self.machine.leave(self._loop.time()))
        self._flush()
        self._alarm.close()
        for task in list(self._watchers):
            task.cancel()
        await self.copies.close()
        self.machine.cache.abandon()
        await self.uplink.close()
        await self._sessions.close()

    @property
    def address(self) -> str:
        """Where the engine connects to."""
        return self._sessions.address or self.config.listen

    def snapshot(self) -> WorkerSnapshot:
        """What this worker shows of itself."""
        return worker_snapshot(
            self.config,
            self.machine,
            self.copies.statistics(),
            self.recorder,
            coordinator=self.uplink.address,
            incarnation=self.incarnation,
            uptime_s=time.monotonic() - self.started_at,
            received={"calls": self.calls},
            ignored=self.ignored,
        )

    # --- the engine -----------------------------------------------------------------------------------------------

    def _asked(self, batch: list[tuple[bytes, bytes]]) -> None:
        self._safely(self._take_calls, batch)

    def _take_calls(self, batch: list[tuple[bytes, bytes]]) -> None:
        """The engine waits for its answers, nobody waits for a frame's last microseconds: answers go out first."""
        now = self._loop.time()
        self.uplink.hold()
        for peer, payload in batch:
            session = self._sessions.number(peer)
            try:
                message = self._engine_decoder.decode(payload)
            except FrameError as error:
                self._ignore(type(error).__name__)
                self._sessions.answer(session, NOBODY, failed(error))
                continue
            for number, call in message.calls:
                self.calls += 1
                self._call(session, number, call, now)
        self._flush()
        self.uplink.release()

    def _call(self, session: int, number: int, call: Call, now: float) -> None:
        try:
            answer = self._answer_here(session, call)
        except KvcoordError as error:
            answer = failed(error)
        if answer is not None:
            self._sessions.answer(session, number, answer)
            return
        self._perform(self.machine.call(session, number, call, now))

    def _answer_here(self, session: int, call: Call) -> Answer | None:
        """Calls about this process rather than about the cache."""
        if type(call) not in _ANSWERED_HERE:
            return None
        if isinstance(call, Open):
            if call.version != LOCAL_VERSION:
                raise UsageError("version", call.version, f"this worker speaks {LOCAL_VERSION}: use the same release")
            return self._opened()
        if isinstance(call, Register):
            if self._engine_session not in (NOBODY, session):
                raise UsageError("session", session, "another engine is connected to this worker: close it first")
            answer = self.copies.register(call)
            self._engine_session, self._model = session, call.model
            self.machine.registered(call.model)
            return answer
        if isinstance(call, Status):
            return StatusBody(msgspec.json.encode(self.snapshot()))
        return None

    def _opened(self) -> Opened:
        group = self.config.group
        return Opened(
            group.name,
            self.config.rank,
            group.world_size,
            group.lag,
            [pool.name for pool in group.pools],
            [pool.page_bytes for pool in group.pools],
            [pool.layers_of_stage(group.stage(self.config.rank)) for pool in group.pools],
            [pool.dtype for pool in group.pools],
            self.config.device_pages,
            self.config.host_pages_shared,
            group.page_tokens,
            group.lockstep,
            [pool.parts for pool in group.pools],
            [pool.tail_pages for pool in group.pools],
            self.config.device_slots,
        )

    def _lost(self, peer: bytes, cause: str) -> None:
        session = self._sessions.forget(peer)
        if session is None:
            return
        self.machine.closed(session)
        if session == self._engine_session:
            self._engine_session = NOBODY
            log.info("engine gone: %s", cause)
            self.copies.unregister()
            if not self._leaving:
                self._perform(self.machine.leave(self._loop.time()))
            self._over = True
            self._begin_again()

    def _begin_again(self) -> None:
        """An engine's life is one membership: once no copy of the last one runs, a new one waits for the next engine.

        Until then the next engine's calls wait with the machine that has left; it may have registered already.
        """
        if self._leaving or not self._over or self.machine.copies_open:
            return
        self._over = False
        self.machine.cache.abandon()
        asked, pages = self.machine.waiting(), self.machine.bequeath()
        self.machine = self._new_machine()
        self.machine.host.inherit(pages, self.machine.cache.state)
        if self._engine_session:
            self.machine.registered(self._model)
        self._perform(self.machine.start(self._loop.time()))
        for session, number, call in asked:
            self._perform(self.machine.call(session, number, call, self._loop.time()))
        self._flush()
        self._between_lives()

    def _new_machine(self) -> WorkerMachine:
        self.incarnation = int.from_bytes(os.urandom(7), "little")
        machine = self._make_machine(self.config, self.incarnation)
        machine.host.reached_by(self.copies.reach)
        return machine

    # --- the group ------------------------------------------------------------------------------------------------

    def _heard(self, batch: list[bytes]) -> None:
        self._safely(self._take_messages, batch)

    def _take_messages(self, batch: list[bytes]) -> None:
        now = self._loop.time()
        for payload in batch:
            try:
                message = self._decoder.decode(payload)
            except FrameError as error:
                self._ignore(type(error).__name__)
                continue
            self._recording.message(message)
            self._perform(self.machine.receive(message, now))
        self._flush()

    def _parted(self) -> None:
        self._safely(self._step, self.machine.disconnected)

    def _unconnected(self) -> None:
        self._safely(self._step, self.machine.unconnected)

    def _rang(self) -> None:
        self._safely(self._step, self.machine.tick)

    def _step(self, step: Callable[[float], list[WorkerEffect]]) -> None:
        self._perform(step(self._loop.time()))
        self._flush()

    # --- copies ---------------------------------------------------------------------------------------------------

    def _copy_ended(self, operation: OperationId, error: Reason | None) -> None:
        self._transfers.pop(operation, None)
        self._safely(self._take_end, operation, error)

    def _take_end(self, operation: OperationId, error: Reason | None) -> None:
        now = self._loop.time()
        self._recording.copy_ended(operation, error)
        self._perform(self.machine.copy_ended(operation, error, now))
        self._begin_again()
        self._flush()

    def _hosts_mapped(self, history: int, error: ConfigError | None) -> None:
        if error is not None:
            self._end(error)
        self._safely(self._step, partial(self.machine.hosts_mapped, history))

    def _watch(self, session: int, operation: OperationId) -> None:
        """Tells a session about each layer of a load-back that it did not wait for."""
        transfer = self._transfers[operation]
        if transfer is None:
            self._sessions.tell(session, Landed(operation, 0, "the copy could not start"))
            return
        task = self._loop.create_task(self._tell_layers(session, transfer))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _tell_layers(self, session: int, transfer: Transfer) -> None:
        try:
            for layer in range(transfer.layer_count):
                await transfer.layer(layer)
                self._sessions.tell(session, Landed(transfer.name, layer + 1))
        except KvcoordError as error:
            self._sessions.tell(session, Landed(transfer.name, transfer.layers_landed, str(error)))

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self._recording.performed(effect)
                self._sessions.answer(effect.session, effect.call, effect.answer)
            elif isinstance(effect, SendUp):
                self._recording.message(effect.message)
                self.uplink.send(encode(effect.message))
            elif isinstance(effect, StartCopy):
                self._recording.performed(effect)
                self._transfers[effect.operation] = self.copies.start(effect)
            elif isinstance(effect, MapHosts):
                self.copies.follow(effect.named, partial(self._hosts_mapped, effect.history))
            elif isinstance(effect, Attach):
                self.uplink.attach(effect.index, self.incarnation)
            else:
                self._note(effect)
        if self.machine.failure is not self._failure:
            self._failed(self.machine.failure)

    def _failed(self, failure: Failed | None) -> None:
        """The machine has come to an end of its own, or (None) a new one has begun."""
        self._failure = failure
        if failure is None:
            return
        if failure.error == "JoinRefused":
            self._end(JoinRefused(*failure.fields))  # type: ignore[arg-type]
            return
        cause = f"{failure.error} {failure.fields}"
        self.recorder.record(time.monotonic(), "failed", "", {"error": failure.error, "fields": failure.fields})
        self._recording.caught_up(self.machine.cache.state.digest)
        self.dumps.write(cause)

    def _note(self, note: Note) -> None:
        self.recorder.record(time.monotonic(), note.kind, note.operation, note.detail)
        if note.kind == "divergence" and self.machine.divergences == 1 and self.machine.failure is None:
            self._recording.caught_up(self.machine.cache.state.digest)
            self.dumps.write(f"divergence: {note.operation}")
        log.warning("%s %s %s", note.kind, note.operation, note.detail)

    def _flush(self) -> None:
        """Sends everything that became known in this wake-up, one message to each session; then what can wait."""
        for session, answer in self._sessions.flush():
            if type(answer) not in _STARTING_COPIES:
                continue
            if isinstance(answer, Acquired | Loaded) and answer.operation in self._transfers:
                self._watch(session, answer.operation)
        self._alarm.set(self.machine.deadline())
        self._recording.caught_up(self.machine.cache.state.digest)

    def _safely(self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """A machine that raised is not asked again: what it holds cannot be trusted, and the process ends with why."""
        if self.ended.done():
            return
        try:
            act(*arguments)
        except Exception as error:
            log.exception("the worker stops")
            self._end(error)

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def _ignore(self, cause: str) -> None:
        self.ignored[cause] = self.ignored.get(cause, 0) + 1
