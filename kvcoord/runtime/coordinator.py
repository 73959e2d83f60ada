"""The coordinator, performed: sockets, time and an HTTP port around the machine that decides.

    async with Coordinator(config) as coordinator:      # inside any process; `serve` is the whole of one
        print(coordinator.addresses)

What has arrived at one listener is one batch: all its messages step the machine, then the effects are performed in
order, each message encoded once for all its receivers. There are no tasks. A peer belongs to the listener that it came
through: the machine knows it by one byte for the listener and the peer's own name.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Final, get_args

import msgspec

from kvcoord.config import CoordinatorConfig, Loaded, resolved
from kvcoord.config.address import split_host_port
from kvcoord.domain import Reason
from kvcoord.errors import ConfigError, FrameError, FrameOversized, KvcoordError
from kvcoord.observability.http import HttpServer
from kvcoord.observability.http_routes import process_routes
from kvcoord.observability.metrics import CoordinatorMetrics
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.observability.snapshot import CoordinatorSnapshot
from kvcoord.protocol.codec import encode, rank_decoder
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import CoordinatorEffect, Note
from kvcoord.protocol.messages import (
    INCARNATION_BITS,
    Completion,
    Decision,
    FromCoordinator,
    FromRank,
    Numbered,
    Refused,
    StatusReply,
    StatusRequest,
)
from kvcoord.runtime.alarm import Alarm
from kvcoord.runtime.coordinator_limits import GROUP_FORGET_S, group_limits, link_limits, wait_shortest_s
from kvcoord.runtime.coordinator_status import CoordinatorStatus
from kvcoord.runtime.dumps import Dumps
from kvcoord.runtime.process import Stop
from kvcoord.runtime.recording import NO_PEER, note_message
from kvcoord.transport.by_scheme import SchemeTransport
from kvcoord.transport.curve import load_server_keys
from kvcoord.transport.link import SENT, UNREACHABLE, Listener, Transport
from kvcoord.transport.zeromq import ZeromqTransport

log = logging.getLogger(__name__)

PROBE_DELAY_S: Final = 0.02
"""From a connection that broke until everybody is probed: the transport has let go of the peer by then."""

LISTENERS_MAX: Final = 256
"""A listener is one byte of its peers' names."""

DUMP_INTERVAL_S: Final = 60.0
"""Writing the recorder out takes a moment in which no group is served: groups that diverge often share it."""

_STATUS_FRAME_BYTES: Final = 64
"""What a StatusReply adds to its body."""

_WARNINGS: Final = frozenset({"divergence", "round_without", "member_lost", "join_refused"})


class Coordinator:
    """Serves the groups that join it, on the event loop on which it was made. Opened once, closed once.

    `transport` None: by the scheme of each address, with the configured keys. `sources` says where each option came
    from, for `/config`.
    `failure` gets the exception when the machine raised one: what it holds cannot be trusted, and no more is served.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        transport: Transport | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.recorder = FlightRecorder("coordinator", config.limits.recorder_events_max)
        self.incarnation = int.from_bytes(os.urandom(INCARNATION_BITS // 8), "big")
        self.dumps = Dumps(self.recorder, config.recorder_dir)
        self._dump_next_at = float("-inf")
        limits = group_limits(config)
        self.machine = CoordinatorMachine(
            self.incarnation,
            limits,
            groups_max=config.limits.groups_max,
            ranks_max=config.limits.ranks_max,
            group_forget_s=GROUP_FORGET_S,
        )
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._started_at = self._loop.time()
        self._sources = {} if sources is None else sources
        self._transport = transport
        self._listeners: list[Listener] = []
        self._http: HttpServer | None = None
        self._decoder = rank_decoder(config.limits.message_bytes_max)
        self._received: dict[type[msgspec.Struct], int] = dict.fromkeys(get_args(FromRank), 0)
        self._joins_refused: dict[str, int] = {}
        self._status = CoordinatorStatus(self.machine, self.recorder)
        self._alarm = Alarm(self._loop, self._rang)
        self._alarm_set = False
        self._wait_shortest_s = wait_shortest_s(limits)
        self._looking = False
        self._not_ready = "starting"

    async def __aenter__(self) -> "Coordinator":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Serves on every address. Raises ConfigError when one is taken or wrong; nothing stays open then."""
        try:
            await self._open_listeners()
            if self.config.http is not None:
                self._http = self._http_server(self.config.http)
                await self._http.open()
        except BaseException:
            await self.close()
            raise
        self._not_ready = ""

    async def close(self) -> None:
        """Delivers what is queued for at most the linger time. Members notice by the silence, or at their next word."""
        self._not_ready = "draining"
        self._alarm.close()
        if self._http is not None:
            await self._http.close()
        await asyncio.gather(*(listener.close() for listener in self._listeners))
        self._not_ready = "closed"

    @property
    def addresses(self) -> list[str]:
        """Where ranks reach it, in the order of `bind`, with the ports that the system picked."""
        return [listener.address for listener in self._listeners]

    @property
    def http_address(self) -> str:
        """`host:port` of the HTTP port, empty when there is none."""
        return "" if self._http is None else self._http.address

    @property
    def not_ready(self) -> str:
        """Why it does not serve, empty when it does. A group that is not complete has a reason of its own."""
        return self._not_ready

    def snapshot(self) -> CoordinatorSnapshot:
        """What the coordinator shows of itself."""
        links = [listener.statistics() for listener in self._listeners]
        now = self._loop.time()
        return self._status.snapshot(
            now,
            uptime_s=now - self._started_at,
            not_ready=self._not_ready,
            received={kind.__name__: count for kind, count in self._received.items()},
            dropped={
                "oversized": sum(link.messages_oversized for link in links),
                "malformed": sum(link.messages_malformed for link in links),
            },
            joins_refused=self._joins_refused,
        )

    # --- opening --------------------------------------------------------------------------------------------------

    async def _open_listeners(self) -> None:
        config = self.config
        if len(config.bind) > LISTENERS_MAX:
            raise ConfigError("bind", len(config.bind), f"at most {LISTENERS_MAX} addresses")
        transport = self._transport or _by_scheme(config)
        limits = link_limits(config)
        for index, address in enumerate(config.bind):
            prefix = bytes((index,))
            on_batch, on_lost = partial(self._arrived, prefix), partial(self._lost, prefix)
            self._listeners.append(
                await transport.open_listener(
                    address, on_batch=on_batch, on_lost=on_lost, limits=limits, on_parted=self._parted
                )
            )

    def _http_server(self, address: str) -> HttpServer:
        host, port = split_host_port("http", address)
        metrics = CoordinatorMetrics(self.snapshot)
        routes = process_routes(
            not_ready=lambda: self._not_ready,
            metrics=metrics.render,
            status=self.snapshot,
            config=lambda: resolved(Loaded(self.config, self._sources)),
            events=lambda: self.recorder.text("asked for"),
        )
        return HttpServer(host, port, routes)

    # --- events ---------------------------------------------------------------------------------------------------

    def _arrived(self, prefix: bytes, batch: list[tuple[bytes, bytes]]) -> None:
        if self.failure.done():
            return
        now = self._loop.time()
        decode, step, received = self._decoder.decode, self.machine.step, self._received
        recorder = self.recorder
        effects: list[CoordinatorEffect] = []
        asked: list[tuple[bytes, StatusRequest]] = []
        try:
            for name, payload in batch:
                peer = prefix + name
                try:
                    message = decode(payload)
                except FrameError as error:
                    effects += self.machine.malformed(peer, error)
                    continue
                received[type(message)] += 1
                note_message(recorder, peer, message)
                if type(message) is StatusRequest:
                    asked.append((peer, message))
                else:
                    effects += step(peer, message, now)
            self._perform(effects, now)
        except Exception as error:
            self._fail(error)
            return
        if asked:
            self._answer(asked)
        if not self._alarm_set:
            self._set_alarm(now + self._wait_shortest_s)

    def _lost(self, prefix: bytes, name: bytes, cause: str) -> None:
        if self.failure.done():
            return
        now = self._loop.time()
        try:
            self._perform(self.machine.gone(prefix + name, now), now)
        except Exception as error:
            self._fail(error)

    def _parted(self) -> None:
        """Some peer is gone: who it was shows when everybody is sent a word. Many that go at once take one look."""
        if not self._looking:
            self._looking = True
            self._loop.call_later(PROBE_DELAY_S, self._look)

    def _look(self) -> None:
        self._looking = False
        if self.failure.done() or self._not_ready:
            return
        try:
            self._perform(self.machine.probe(), self._loop.time())
        except Exception as error:
            self._fail(error)

    def _rang(self) -> None:
        """Lets deadlines pass.

        Between two rings only deadlines later than the shortest wait can have come about, so a batch need not look at
        the deadlines of all groups: the next ring is never later than that.
        """
        self._alarm_set = False
        now = self._loop.time()
        try:
            effects = self.machine.tick(now)
            _warn_of_timeouts(effects)
            self._perform(effects, now)
            deadline = self.machine.deadline()
        except Exception as error:
            self._fail(error)
            return
        if deadline is not None:
            self._set_alarm(min(deadline, now + self._wait_shortest_s))

    def _set_alarm(self, deadline: float) -> None:
        self._alarm_set = True
        self._alarm.set(deadline)

    def _fail(self, error: Exception) -> None:
        """A machine that raised is not asked again; whoever runs the coordinator learns why."""
        if not isinstance(error, KvcoordError):
            log.error("the coordinator stops", exc_info=error)
        self._not_ready = f"failed: {error}"
        self._alarm.close()
        self.failure.set_exception(error)

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[CoordinatorEffect], now: float) -> None:
        """Performs `effects` in order.

        A peer that cannot be reached is gone, which has effects of its own: they come last in the same list. That
        ends, since each loses a member.
        """
        listeners = self._listeners
        for effect in effects:
            if type(effect) is Note:
                self._note(effect, now)
                continue
            message = effect.message
            if type(message) is Refused:
                self._joins_refused[message.reason] = self._joins_refused.get(message.reason, 0) + 1
            payload = encode(message)
            note_message(self.recorder, effect.peers[0] if effect.peers else NO_PEER, message)
            for peer in effect.peers:
                try:
                    result = listeners[peer[0]].send(peer[1:], payload)
                except FrameOversized as error:
                    log.error("%s cannot be sent, its receiver is given up: %s", type(message).__name__, error)
                    result = UNREACHABLE
                if result is not SENT:
                    effects += self.machine.gone(peer, now)

    def _answer(self, asked: list[tuple[bytes, StatusRequest]]) -> None:
        body = self._status_body()
        for peer, request in asked:
            payload = encode(StatusReply(request.nonce, body))
            self._listeners[peer[0]].send(peer[1:], payload)

    def _status_body(self) -> bytes:
        """The snapshot as JSON, short enough for one message: of very many ranks or groups only the numbers above."""
        snapshot = self.snapshot()
        body = msgspec.json.encode(snapshot)
        size_bytes_max = self.config.limits.message_bytes_max - _STATUS_FRAME_BYTES
        if len(body) > size_bytes_max:
            groups = [msgspec.structs.replace(group, ranks=[]) for group in snapshot.groups]
            body = msgspec.json.encode(msgspec.structs.replace(snapshot, groups=groups))
        if len(body) > size_bytes_max:
            body = msgspec.json.encode(msgspec.structs.replace(snapshot, groups=[]))
        return body

    def _note(self, note: Note, now: float) -> None:
        self.recorder.record(monotonic(), note.kind, note.operation, note.detail)
        if note.kind == "divergence" and now >= self._dump_next_at:
            self._dump_next_at = now + DUMP_INTERVAL_S
            self.dumps.write(f"divergence: {note.operation}")
        if note.kind == "member_lost":
            group = str(note.detail.get("group", ""))
            self._status.ranks_lost[group] = self._status.ranks_lost.get(group, 0) + 1
        level = logging.WARNING if note.kind in _WARNINGS else logging.INFO
        fields = {"operation": note.operation, **note.detail} if note.operation else note.detail
        log.log(level, note.kind.replace("_", " "), extra=fields)


async def serve(config: CoordinatorConfig, stop: Stop, sources: Mapping[str, str] | None = None) -> int:
    """A whole coordinator process: until `stop`, or until the machine fails, which is raised. Returns the exit code."""
    async with Coordinator(config, sources=sources) as coordinator:
        stop.watch(coordinator.recorder, config.recorder_dir)
        stop.ready(coordinator.addresses, coordinator.http_address)
        log.info("serving", extra={"addresses": coordinator.addresses, "http": coordinator.http_address})
        asked = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({asked, coordinator.failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if coordinator.failure.done():
            coordinator.failure.result()
        log.info("stopping", extra={"cause": stop.cause})
    return 0


def _by_scheme(config: CoordinatorConfig) -> Transport:
    keys = None if config.curve_keys_dir is None else load_server_keys(config.curve_keys_dir)
    return SchemeTransport(ZeromqTransport(server_keys=keys, insecure_tcp=config.insecure_tcp))


def _warn_of_timeouts(effects: list[CoordinatorEffect]) -> None:
    """What time alone has ended: one line for all operations of a tick that ended for the same reason and rank."""
    ended: dict[tuple[Reason, int], list[str]] = {}
    for effect in effects:
        message: FromCoordinator | None = None if isinstance(effect, Note) else effect.message
        if isinstance(message, Numbered):
            entry: Decision | Completion = message.entry
            if entry.reason in (Reason.VOTE_TIMEOUT, Reason.COPY_TIMEOUT):
                ended.setdefault((entry.reason, entry.rank), []).append(entry.operation)
    for (reason, rank), operations in ended.items():
        fields = {"operation": operations[0], "rank": rank, "operations": len(operations)}
        log.warning("ended by %s", reason.value, extra=fields)
