"""One coordinator without sockets: its shell, codec and machines take the frames of simulated ranks.

Run as `python -m kvcoord.load.bench.tally`, with a TallyPlan as a line on its standard input; prints a TallyReport. A
process of its own, so that its memory is that of the coordinator. What is timed is decoding, deciding, encoding once
for each verdict, and handing it to a transport that drops it.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Final

import msgspec

from kvcoord.config import CoordinatorConfig
from kvcoord.config.limits import Limits
from kvcoord.domain import OperationKind
from kvcoord.errors import ConfigError
from kvcoord.load.bench.host import usage
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.messages import (
    NO_EPOCH,
    PROTOCOL_VERSION,
    Accept,
    Frame,
    Hello,
    Prepare,
    Report,
    Vote,
)
from kvcoord.runtime.coordinator import Coordinator
from kvcoord.transport.link import (
    Connected,
    Connection,
    ConnectionBatch,
    LinkLimits,
    LinkStatistics,
    ListenerBatch,
    Lost,
    PeerLost,
    SendResult,
)

BATCH_MESSAGES_MAX: Final = LinkLimits().batch_messages_max
FREE: Final = [4096, 4096]


class TallyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds` rounds in each of `groups` groups of `ranks` ranks, with `votes` votes in every frame.

    `copies_open` operations of each group are agreed on before, and their copies never end.
    """

    ranks: int
    groups: int
    votes: int
    rounds: int
    copies_open: int = 0


class TallyReport(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds_us`: one round of one group, for each round (over all groups their mean). `group_bytes`: resident growth
    for each group that has joined."""

    rounds_us: list[float]
    resident_bytes: int
    group_bytes: int
    messages_out: int


class SinkListener:
    """Takes every message. Those sent while `kept` is a list are kept in it."""

    def __init__(self, address: str, on_batch: ListenerBatch) -> None:
        self.address = address
        self.on_batch = on_batch
        self.kept: list[tuple[bytes, bytes]] | None = None
        self.messages = 0

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        self.messages += 1
        if self.kept is not None:
            self.kept.append((peer, payload))
        return SendResult.SENT

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(messages_sent=self.messages)

    async def close(self, linger_s: float | None = None) -> None:
        """Nothing is open."""


class SinkTransport:
    """A `link.Transport` with one listener and no peers behind it."""

    def __init__(self) -> None:
        self.listener: SinkListener | None = None

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Callable[[], None] | None = None,
    ) -> SinkListener:
        self.listener = SinkListener(address, on_batch)
        return self.listener

    async def open_connection(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
        on_absent: Callable[[], None] | None = None,
    ) -> Connection:
        raise ConfigError("address", address, "nobody serves here: this transport only listens")


class SimulatedGroups:
    """The ranks of some groups, as far as a coordinator sees them."""

    def __init__(self, listener: SinkListener, ranks: int, groups: int) -> None:
        self._listener = listener
        self._names = [f"group{number}" for number in range(groups)]
        self._ranks = range(ranks)
        self._epochs: dict[str, int] = {}

    def join(self) -> None:
        """Hello of all ranks, then Accept of what the coordinator proposes."""
        decoder = coordinator_decoder()
        report = Report(NO_EPOCH, 0, [], [], [], -1, [], FREE, True)
        for name in self._names:
            self._listener.kept = []
            self._send([(_peer(name, rank), encode(self._hello(name, rank))) for rank in self._ranks])
            heard, self._listener.kept = self._listener.kept, None
            prepared = [message for _, payload in heard if isinstance(message := decoder.decode(payload), Prepare)]
            self._epochs[name] = epoch = prepared[0].epoch
            accept = encode(Accept(epoch, report))
            self._send([(_peer(name, rank), accept) for rank in self._ranks])

    def play(self, rounds: int, votes: int, copies_open: int) -> list[float]:
        """Plays rounds and returns microseconds that one round of one group takes, for each."""
        first = 0
        if copies_open:
            self._round(0, [_yes(OperationKind.WRITE_THROUGH, 0, vote) for vote in range(copies_open)])
            first = 1
        return [
            self._round(number, [_yes(OperationKind.CUSTOM, number, vote) for vote in range(votes)])
            for number in range(first, first + rounds)
        ]

    def _round(self, number: int, said: list[Vote]) -> float:
        first_round = 0 if number == 0 else -1
        messages = []
        for name in self._names:
            frame = encode(Frame(self._epochs[name], number, said, [], FREE, number, first_round))
            messages += [(_peer(name, rank), frame) for rank in self._ranks]
        batches = [messages[at : at + BATCH_MESSAGES_MAX] for at in range(0, len(messages), BATCH_MESSAGES_MAX)]
        begun = perf_counter_ns()
        for batch in batches:
            self._listener.on_batch(batch)
        return (perf_counter_ns() - begun) / 1000 / len(self._names)

    def _hello(self, name: str, rank: int) -> Hello:
        return Hello(PROTOCOL_VERSION, name, rank, len(self._ranks), rank + 1, 1, NO_EPOCH, {})

    def _send(self, batch: list[tuple[bytes, bytes]]) -> None:
        self._listener.on_batch(batch)


def _yes(kind: OperationKind, number: int, vote: int) -> Vote:
    return Vote(f"{kind}/{number}/{vote}", kind, True)


def _peer(name: str, rank: int) -> bytes:
    return f"{name}/{rank}".encode()


async def tally(plan: TallyPlan) -> TallyReport:
    """Plays the plan on a coordinator of this process."""
    transport = SinkTransport()
    limits = Limits(groups_max=max(plan.groups, 1), ranks_max=max(plan.ranks, 1))
    config = CoordinatorConfig(bind=["ipc:///tally"], http=None, limits=limits)
    async with Coordinator(config, transport=transport):
        assert transport.listener is not None
        groups = SimulatedGroups(transport.listener, plan.ranks, plan.groups)
        before = usage(os.getpid()).resident_bytes
        groups.join()
        gc.collect()
        gc.freeze()
        joined = usage(os.getpid()).resident_bytes
        rounds_us = groups.play(plan.rounds, plan.votes, plan.copies_open)
        return TallyReport(
            rounds_us=rounds_us,
            resident_bytes=usage(os.getpid()).resident_bytes,
            group_bytes=(joined - before) // plan.groups,
            messages_out=transport.listener.messages,
        )


def _lines() -> Iterator[TallyPlan]:
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=TallyPlan)


def main() -> int:
    """One plan a line, until the end of the input."""
    for plan in _lines():
        report = asyncio.run(tally(plan))
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
