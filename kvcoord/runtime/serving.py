"""A whole worker process: the worker, its HTTP port, its keys, and the coordinator if it embeds one."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, AsyncExitStack

from kvcoord.config import CoordinatorConfig, Loaded, WorkerConfig, resolved
from kvcoord.config.address import split_host_port
from kvcoord.observability.http import HttpServer
from kvcoord.observability.http_routes import process_routes
from kvcoord.observability.metrics import WorkerMetrics
from kvcoord.observability.recorder import FlightRecorder
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.runtime.garbage import collect_everything, survivors_set_aside
from kvcoord.runtime.process import Stop
from kvcoord.runtime.worker import Worker
from kvcoord.transport.by_scheme import SchemeTransport
from kvcoord.transport.curve import load_client_keys
from kvcoord.transport.link import Transport
from kvcoord.transport.unix import UnixTransport
from kvcoord.transport.zeromq import ZeromqTransport

log = logging.getLogger(__name__)


async def serve(config: WorkerConfig, stop: Stop, sources: Mapping[str, str] | None = None) -> int:
    """Serves one rank until `stop`. Raises JoinRefused when the group does not have it, ConfigError for an address."""
    recorder = FlightRecorder(f"rank{config.rank}", config.limits.recorder_events_max)
    stop.watch(recorder, config.recorder_dir)
    async with AsyncExitStack() as stack:
        if config.embed_coordinator and config.rank == 0:
            await stack.enter_async_context(Coordinator(embedded_coordinator(config)))
        stack.enter_context(survivors_set_aside())
        worker = Worker(config, UnixTransport(), rank_transport(config), recorder, between_lives=collect_everything)
        stack.push_async_callback(worker.close)
        await worker.open()
        http = await _open_http(config, worker, sources or {})
        if http is not None:
            stack.push_async_callback(http.close)
        stop.ready([worker.address], "" if http is None else http.address)
        log.info("serving", extra={"address": worker.address, "rank": config.rank})
        asked: asyncio.Future[None] = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[None] | asyncio.Future[Exception]] = [asked, worker.ended]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if worker.ended.done():
            raise worker.ended.result()
    return 0


def embedded_coordinator(config: WorkerConfig) -> CoordinatorConfig:
    """The coordinator that rank 0 carries: at the first address of the list, with this worker's limits."""
    return CoordinatorConfig(
        bind=[config.coordinators[0]],
        http=None,
        insecure_tcp=config.insecure_tcp,
        curve_keys_dir=config.curve_keys_dir,
        recorder_dir=config.recorder_dir,
        timeouts=config.timeouts,
        limits=config.limits,
    )


def rank_transport(config: WorkerConfig, guard: AbstractContextManager[object] | None = None) -> Transport:
    """What reaches the coordinators, with this rank's keys. `guard`: see `transport.node.NodeTransport`."""
    keys = None if config.curve_keys_dir is None else load_client_keys(config.curve_keys_dir)
    return SchemeTransport(ZeromqTransport(client_keys=keys, insecure_tcp=config.insecure_tcp), guard)


async def _open_http(config: WorkerConfig, worker: Worker, sources: Mapping[str, str]) -> HttpServer | None:
    if config.http is None:
        return None
    host, port = split_host_port("http", config.http)
    metrics = WorkerMetrics(worker.snapshot)
    routes = process_routes(
        not_ready=lambda: worker.machine.not_ready,
        metrics=metrics.render,
        status=worker.snapshot,
        config=lambda: resolved(Loaded(config, dict(sources))),
        events=lambda: worker.recorder.text("asked for"),
    )
    server = HttpServer(host, port, routes)
    await server.open()
    return server
