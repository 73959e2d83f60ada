"""A coordinator process under frames, over a node link or over ZeroMQ: its processor time, memory and start.

The ranks are the production machines behind the production transport, all in this process: what they cost is not
counted.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from kvcoord.config.process import CoordinatorConfig, LogLevel
from kvcoord.domain import OperationKind
from kvcoord.load.bench.bed import write_config
from kvcoord.load.bench.host import usage
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.effects import Activated, RankEffect, SendUp, VerdictReady
from kvcoord.protocol.messages import Vote
from kvcoord.protocol.rank import Identity, RankLimits, RankMachine
from kvcoord.runtime.children import KVCOORD, SERVE, Children
from kvcoord.transport.by_scheme import SchemeTransport
from kvcoord.transport.link import Connection, LinkLimits
from kvcoord.transport.node import SCHEME
from kvcoord.transport.zeromq import ZeromqTransport

SCHEMES: Final = (SCHEME, "ipc://")
"""The node link, which is the default on one node, and ZeroMQ."""

FREE: Final = (4096, 4096)
IDLE_S: Final = 2.0
JOIN_TIMEOUT_S: Final = 30.0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """`round_cpu_s` is processor time of one round; `idle_cpu_share` that of a second without a frame."""

    scheme: str
    ranks: int
    votes: int
    ready_s: float
    round_cpu_s: float
    idle_cpu_share: float
    resident_bytes: int


async def serve(scheme: str, ranks: int, *, votes: int, rounds: int, idle_s: float = IDLE_S) -> Served:
    """Starts a coordinator, joins the ranks, plays rounds one after another, then leaves it idle."""
    with tempfile.TemporaryDirectory(prefix="kvcoord-") as name:
        folder = Path(name)
        address = f"{scheme}{folder}/coordinator.sock"
        path = write_config(
            folder, "coordinator", CoordinatorConfig(bind=[address], http=None, log_level=LogLevel.ERROR)
        )
        async with Children(keep_errors=True) as children:
            begun_s = time.monotonic()
            child = await children.start("coordinator", [*KVCOORD, "coordinator", "--config", path, *SERVE])
            await child.ready()
            ready_s = time.monotonic() - begun_s
            crowd = Crowd(ranks)
            await crowd.open(address)
            await crowd.play(20, votes)
            before = usage(child.pid)
            await crowd.play(rounds, votes)
            loaded = usage(child.pid)
            await asyncio.sleep(idle_s)
            idle = usage(child.pid)
            await crowd.close()
    return Served(
        scheme=scheme,
        ranks=ranks,
        votes=votes,
        ready_s=ready_s,
        round_cpu_s=(loaded.cpu_s - before.cpu_s) / rounds,
        idle_cpu_share=(idle.cpu_s - loaded.cpu_s) / idle_s,
        resident_bytes=idle.resident_bytes,
    )


class Crowd:
    """All ranks of one group, on this event loop."""

    def __init__(self, ranks: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = SchemeTransport(ZeromqTransport())
        self._decoder = coordinator_decoder()
        self._machines = [_machine(rank, ranks) for rank in range(ranks)]
        self._connections: list[Connection] = []
        self._waiting = 0
        self._all_there = asyncio.Event()
        self._round = 0
        self._beating: asyncio.TimerHandle | None = None

    async def open(self, address: str) -> None:
        """Joins. Raises TimeoutError when the group does not come together."""
        for rank in range(len(self._machines)):
            connection: Connection = await self._transport.open_connection(
                address,
                f"crowd{rank}".encode(),
                on_batch=lambda batch, rank=rank: self._heard(rank, batch),  # type: ignore[misc]
                on_connected=lambda: None,
                on_lost=lambda _: None,
                limits=LinkLimits(),
            )
            self._connections.append(connection)
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            for connection in self._connections:
                await connection.wait_connected()
            self._expect()
            for rank, machine in enumerate(self._machines):
                self._perform(rank, machine.start(self._loop.time()))
            await self._all_there.wait()
        self._beat()

    async def play(self, rounds: int, votes: int) -> None:
        """One round after another, each rank's frame with so many votes."""
        for _ in range(rounds):
            self._expect()
            number, self._round = self._round, self._round + 1
            now = self._loop.time()
            for rank, machine in enumerate(self._machines):
                for vote in range(votes):
                    machine.defer(Vote(f"write-through/{number}/{vote}", OperationKind.CUSTOM, True))
                self._perform(rank, machine.frame(number, list(FREE), 0, now))
            await self._all_there.wait()

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.gather(*(connection.close(0) for connection in self._connections))

    def _expect(self) -> None:
        self._waiting = len(self._machines)
        self._all_there.clear()

    def _heard(self, rank: int, batch: list[bytes]) -> None:
        now = self._loop.time()
        for payload in batch:
            self._perform(rank, self._machines[rank].receive(self._decoder.decode(payload), now))

    def _perform(self, rank: int, effects: list[RankEffect]) -> None:
        machine = self._machines[rank]
        for effect in effects:
            if isinstance(effect, SendUp):
                self._connections[rank].send(encode(effect.message))
            elif isinstance(effect, VerdictReady | Activated):
                if isinstance(effect, VerdictReady):
                    machine.rounds.verdict(effect.round)
                self._waiting -= 1
                if not self._waiting:
                    self._all_there.set()

    def _beat(self) -> None:
        """Lets the heartbeats of all ranks go out."""
        now = self._loop.time()
        deadlines = []
        for rank, machine in enumerate(self._machines):
            self._perform(rank, machine.tick(now))
            deadlines.append(machine.deadline() or now)
        self._beating = self._loop.call_at(max(min(deadlines), now + 0.01), self._beat)


def _machine(rank: int, ranks: int) -> RankMachine:
    identity = Identity(group="crowd", rank=rank, world_size=ranks, incarnation=rank + 1, fingerprint={})
    return RankMachine(identity, 1, 1, RankLimits(), lambda: list(FREE), lockstep=True)
