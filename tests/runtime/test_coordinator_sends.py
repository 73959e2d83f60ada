"""What the coordinator does with its sockets, against a transport that answers as it is told to."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcoord.config import CoordinatorConfig, Limits
from kvcoord.domain import OperationKind, Reason
from kvcoord.errors import FrameOversized, InvariantBroken
from kvcoord.protocol.codec import coordinator_decoder, encode
from kvcoord.protocol.group import GroupLimits
from kvcoord.protocol.messages import (
    Accept,
    Activate,
    FromCoordinator,
    FromRank,
    Hello,
    Numbered,
    Prepare,
    Report,
    StreamVote,
    Suspended,
    Vote,
)
from kvcoord.runtime.coordinator import Coordinator, serve
from kvcoord.runtime.process import Stop
from kvcoord.transport.link import (
    Absent,
    Connected,
    Connection,
    ConnectionBatch,
    LinkLimits,
    LinkStatistics,
    ListenerBatch,
    Lost,
    Parted,
    PeerLost,
    SendResult,
)
from kvcoord.transport.zeromq import ZeromqTransport
from tests.runtime.rank_shell import RankShell

ADDRESSES = ["ipc:///a", "ipc:///b"]


class FakeListener:
    """Keeps what was sent; `results` says what becomes of messages to a peer."""

    def __init__(self, address: str, on_batch: ListenerBatch, on_lost: PeerLost, limits: LinkLimits) -> None:
        self.address = address
        self.on_batch, self.on_lost, self.limits = on_batch, on_lost, limits
        self.sent: list[tuple[bytes, FromCoordinator]] = []
        self.payloads: list[bytes] = []
        self.results: dict[bytes, SendResult] = {}
        self.closed = False
        self._decoder = coordinator_decoder()

    def send(self, peer: bytes, payload: bytes) -> SendResult:
        if len(payload) > self.limits.message_bytes_max:
            raise FrameOversized("too long", len(payload))
        result = self.results.get(peer, SendResult.SENT)
        if result is SendResult.SENT:
            self.sent.append((peer, self._decoder.decode(payload)))
            self.payloads.append(payload)
        return result

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(messages_oversized=2)

    async def close(self, linger_s: float | None = None) -> None:
        self.closed = True

    def receive(self, *said: tuple[bytes, FromRank]) -> None:
        """One batch."""
        self.on_batch([(peer, encode(message)) for peer, message in said])

    def last(self, peer: bytes) -> FromCoordinator:
        return [message for receiver, message in self.sent if receiver == peer][-1]


class FakeTransport:
    def __init__(self) -> None:
        self.listeners: list[FakeListener] = []

    async def open_listener(
        self,
        address: str,
        *,
        on_batch: ListenerBatch,
        on_lost: PeerLost,
        limits: LinkLimits,
        on_parted: Parted | None = None,
    ) -> FakeListener:
        self.listeners.append(FakeListener(address, on_batch, on_lost, limits))
        return self.listeners[-1]

    async def open_connection(
        self,
        address: str,
        identity: bytes,
        *,
        on_batch: ConnectionBatch,
        on_connected: Connected,
        on_lost: Lost,
        limits: LinkLimits,
        on_absent: Absent | None = None,
    ) -> Connection:
        raise AssertionError("a coordinator connects to nobody")


class Bench:
    """A coordinator with two listeners, and the ranks that speak through them."""

    def __init__(self, coordinator: Coordinator, listeners: list[FakeListener]) -> None:
        self.coordinator = coordinator
        self.first, self.second = listeners

    def join(self, peers: list[bytes]) -> int:
        """All these ranks join through the first listener. Returns the epoch."""
        count = len(peers)
        self.first.receive(*((peer, hello(rank, count)) for rank, peer in enumerate(peers)))
        prepare = self.first.last(peers[0])
        assert isinstance(prepare, Prepare)
        self.first.receive(*((peer, Accept(prepare.epoch, REPORT)) for peer in peers))
        assert all(isinstance(self.first.last(peer), Activate) for peer in peers)
        return prepare.epoch


REPORT = Report(0, 0, [], [], [], -1, [], [8, 9], False)


def hello(rank: int, world_size: int, incarnation: int = 1, group: str = "g") -> Hello:
    return Hello(1, group, rank, world_size, incarnation + rank, 1, 0, {"pools": "kv"})


def no(operation: str, epoch: int) -> StreamVote:
    return StreamVote(epoch, Vote(operation, OperationKind.CUSTOM, False, reason=Reason.BUSY))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    transport = FakeTransport()
    config = CoordinatorConfig(bind=ADDRESSES, http=None, limits=Limits(message_bytes_max=2000))
    async with Coordinator(config, transport=transport) as coordinator:
        yield Bench(coordinator, transport.listeners)
    assert [listener.closed for listener in transport.listeners] == [True, True]


async def test_a_message_for_all_is_encoded_once(bench: Bench) -> None:
    epoch = bench.join([b"r0", b"r1"])
    bench.first.receive((b"r0", no("write/1", epoch)))
    assert [receiver for receiver, _ in bench.first.sent[-2:]] == [b"r0", b"r1"]
    assert bench.first.payloads[-1] is bench.first.payloads[-2]


@pytest.mark.parametrize("result", [SendResult.FULL, SendResult.UNREACHABLE])
async def test_a_member_that_takes_no_message_is_lost_and_the_others_are_told(bench: Bench, result: SendResult) -> None:
    epoch = bench.join([b"r0", b"r1"])
    bench.first.results[b"r1"] = result
    bench.first.receive((b"r0", no("write/1", epoch)))
    *_, decision, suspended = [message for peer, message in bench.first.sent if peer == b"r0"]
    assert isinstance(decision, Numbered)
    assert isinstance(suspended, Suspended)
    assert suspended.rank == 1
    assert list(bench.coordinator.machine.groups["g"].members) == [0]


async def test_losing_every_member_at_once_comes_to_an_end(bench: Bench) -> None:
    peers = [b"r%d" % rank for rank in range(50)]
    epoch = bench.join(peers)
    bench.first.results = dict.fromkeys(peers, SendResult.UNREACHABLE)
    bench.first.receive((peers[0], no("write/1", epoch)))
    assert not bench.coordinator.machine.groups["g"].members
    assert bench.coordinator.snapshot().groups[0].ranks_lost == 50


async def test_a_newcomer_in_the_place_of_an_unreachable_member_is_answered(bench: Bench) -> None:
    bench.join([b"r0", b"r1"])
    bench.first.results[b"r1"] = SendResult.UNREACHABLE
    bench.first.receive((b"new", hello(1, 2, incarnation=100)))
    assert isinstance(bench.first.last(b"new"), Prepare)
    assert isinstance(bench.first.last(b"r0"), Prepare)


async def test_a_message_too_long_to_send_costs_its_receiver_and_nobody_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = bench.join([b"r0", b"r1"])
    bench.second.receive((b"other", hello(0, 2, group="other")))
    shortfall = {f"pool{number}": 1 for number in range(150)}
    refusal = Vote("write/1", OperationKind.CUSTOM, False, reason=Reason.HOST_FULL, shortfall=shortfall)
    bench.first.limits = LinkLimits(message_bytes_max=1000)
    bench.first.receive((b"r0", StreamVote(epoch, refusal)))
    assert not bench.coordinator.failure.done()
    assert not bench.coordinator.machine.groups["g"].members
    assert list(bench.coordinator.machine.groups["other"].members) == [0]
    assert "Numbered cannot be sent" in caplog.text


async def test_one_name_at_two_listeners_is_two_peers(bench: Bench) -> None:
    bench.first.receive((b"same", hello(0, 2)))
    bench.second.receive((b"same", hello(1, 2)))
    prepares = [listener.last(b"same") for listener in (bench.first, bench.second)]
    assert all(isinstance(prepare, Prepare) for prepare in prepares)
    assert list(bench.coordinator.machine.groups["g"].members) == [0, 1]


async def test_a_peer_that_the_transport_lost_is_lost_to_its_group(bench: Bench) -> None:
    bench.join([b"r0", b"r1"])
    bench.second.on_lost(b"r1", "gone, but another one of this name")
    assert list(bench.coordinator.machine.groups["g"].members) == [0, 1]
    bench.first.on_lost(b"r1", "gone")
    assert list(bench.coordinator.machine.groups["g"].members) == [0]


async def test_what_the_transport_dropped_is_counted(bench: Bench) -> None:
    assert bench.coordinator.snapshot().ignored == {"oversized": 4}


async def test_counters_of_a_forgotten_group_do_not_go_back(bench: Bench) -> None:
    epoch = bench.join([b"r0", b"r1"])
    bench.first.receive((b"r0", no("write/1", epoch + 1)))
    assert bench.coordinator.snapshot().ignored["stale_epoch"] == 1
    bench.first.on_lost(b"r0", "gone")
    bench.first.on_lost(b"r1", "gone")
    bench.coordinator.machine.tick(asyncio.get_running_loop().time() + 3600)
    assert not bench.coordinator.machine.groups
    for _ in range(2):
        assert bench.coordinator.snapshot().ignored["stale_epoch"] == 1


async def test_membership_is_logged_and_recorded(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.join([b"r0", b"r1"])
    bench.first.on_lost(b"r1", "gone")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert (levels["activate"], levels["member lost"]) == ("INFO", "WARNING")
    assert "member_lost" in [entry.kind for entry in bench.coordinator.recorder.entries()]
    kinds = ("hello", "prepare", "activate", "member lost")
    groups = [record.__dict__["group"] for record in caplog.records if record.getMessage() in kinds]
    assert groups == ["g"] * 5


class Explosive:
    """A machine that broke an invariant."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def step(self, *_: object) -> None:
        raise self.error

    gone = tick = deadline = malformed = step


@pytest.mark.parametrize("error", [InvariantBroken("agreement", "two outcomes"), ValueError("a defect")])
async def test_a_machine_that_raises_is_not_asked_again(bench: Bench, error: Exception) -> None:
    bench.coordinator.machine = Explosive(error)  # type: ignore[assignment]
    bench.first.receive((b"r0", hello(0, 2)))
    bench.first.receive((b"r0", hello(0, 2)))
    bench.first.on_lost(b"r0", "gone")
    assert bench.coordinator.failure.exception() is error
    assert str(error) in bench.coordinator.not_ready


class ExplosiveMachine(Explosive):
    """What `serve` makes instead of the real one."""

    def __init__(self, incarnation: int, limits: GroupLimits, **options: object) -> None:
        super().__init__(InvariantBroken("agreement", "two outcomes"))
        self.incarnation, self.groups, self.ignored = incarnation, dict[str, object](), dict[str, int]()


async def test_a_coordinator_process_ends_with_the_error_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcoord.runtime.coordinator.CoordinatorMachine", ExplosiveMachine)
    stop = Stop()
    config = CoordinatorConfig(bind=[f"ipc://{tmp_path}/c.sock"], http=None)
    serving = asyncio.ensure_future(serve(config, stop))
    async with RankShell(ZeromqTransport(), config.bind, 0, 2):
        with pytest.raises(InvariantBroken, match="two outcomes"):
            await serving
    assert stop.recorder is not None
    assert not (tmp_path / "c.sock").exists()


async def test_a_coordinator_process_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    stop = Stop()
    stop.request("a test")
    config = CoordinatorConfig(bind=[f"ipc://{tmp_path}/c.sock"], http="127.0.0.1:0")
    assert await serve(config, stop) == 0
    assert not (tmp_path / "c.sock").exists()
