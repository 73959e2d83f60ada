"""What one coordinator does for many groups and for peers that belong to none."""

import pytest

from kvcoord.errors import FrameMalformed, FrameOversized, FrameVersionMismatch, UsageError
from kvcoord.protocol.coordinator import CoordinatorMachine
from kvcoord.protocol.effects import CoordinatorEffect, Send
from kvcoord.protocol.group import GroupLimits, GroupState
from kvcoord.protocol.messages import (
    PROTOCOL_VERSION,
    Accept,
    Alive,
    Frame,
    Heartbeat,
    Hello,
    Prepare,
    Refused,
    Rejoin,
    Report,
    StatusRequest,
    Suspended,
    Waiting,
)


def hello(group: str = "g", rank: int = 0, size: int = 2, incarnation: int = 1, **fields: int) -> Hello:
    return Hello(PROTOCOL_VERSION, group, rank, size, incarnation, 1, 0, {**fields})


def accept(epoch: int, pools: int = 1, *, lockstep: bool = True) -> Accept:
    return Accept(epoch, Report(0, 0, [], [], [], -1, [], [8] * pools, lockstep))


def answers(effects: list[CoordinatorEffect], peer: bytes) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Send) and peer in effect.peers]


def coordinator(**limits: int) -> CoordinatorMachine:
    return CoordinatorMachine(7, GroupLimits(), **limits)


def working(machine: CoordinatorMachine, group: str = "g", size: int = 2) -> list[bytes]:
    """A group that works; its peers."""
    peers = [f"{group}{rank}".encode() for rank in range(size)]
    for rank, peer in enumerate(peers):
        machine.step(peer, hello(group, rank, size), 0.0)
    for peer in peers:
        machine.step(peer, accept(machine.groups[group].epoch), 0.0)
    assert machine.groups[group].state is GroupState.ACTIVE
    return peers


def test_who_is_not_known_is_told_to_say_hello() -> None:
    machine = coordinator()
    assert answers(machine.step(b"p", Heartbeat(3, 0), 0.0), b"p") == [Rejoin(7)]
    assert machine.ignored == {"unknown_peer": 1}
    machine.step(b"p", hello(), 0.0)
    assert answers(machine.step(b"p", StatusRequest(1), 0.0), b"p") == [Rejoin(7)]


def test_groups_do_not_disturb_each_other() -> None:
    machine = coordinator()
    working(machine, "one")
    peers = working(machine, "two", 1)
    effects = machine.gone(peers[0], 1.0)
    assert answers(effects, b"one0") == []
    assert machine.groups["one"].state is GroupState.ACTIVE


def test_a_group_that_is_empty_for_long_is_forgotten_with_its_peers() -> None:
    machine = coordinator()
    for peer in working(machine):
        machine.gone(peer, 1.0)
    assert machine.deadline() == 61.0
    machine.tick(61.0)
    assert machine.groups == {}
    assert machine.deadline() is None


def test_no_peer_is_remembered_that_is_not_a_member() -> None:
    machine = coordinator()
    peers = working(machine)
    for attempt in range(20):
        odd = f"odd{attempt}".encode()
        machine.step(odd, hello(rank=1, incarnation=50 + attempt, page=attempt), 1.0)
        machine.step(peers[0], Heartbeat(machine.groups["g"].epoch, 0, 1000), 1.0)
        machine.step(peers[1], Heartbeat(machine.groups["g"].epoch, 0, 1000), 1.0)
    for attempt in range(20):
        machine.step(f"new{attempt}".encode(), hello(rank=1, incarnation=1), 1.0)
    assert sorted(machine._group_of) == [b"g0", b"new19"]
    machine.tick(10.0)
    assert machine._group_of == {}


def test_a_contender_that_goes_away_is_not_admitted_later() -> None:
    machine = coordinator()
    working(machine)
    waiting = answers(machine.step(b"twin", hello(rank=1, incarnation=2), 1.0), b"twin")
    assert waiting == [Waiting(7, 1, [], 1)]
    machine.gone(b"twin", 2.0)
    machine.tick(3.0)
    assert machine.groups["g"].members == {}


def test_an_answer_from_before_the_probe_does_not_refuse_the_newcomer() -> None:
    """Messages of a killed process are still read after its successor's Hello."""
    machine = coordinator()
    peers = working(machine)
    epoch = machine.groups["g"].epoch
    machine.step(b"twin", hello(rank=1, incarnation=2), 1.0)
    effects = machine.step(peers[1], Heartbeat(epoch, 0), 1.0)
    effects += machine.step(peers[1], Frame(epoch, 0, [], [], [8], 0), 1.0)
    assert answers(effects, b"twin") == []
    effects = machine.tick(4.5)
    assert any(isinstance(message, Waiting | Prepare) for message in answers(effects, b"twin"))


def test_the_answer_to_an_earlier_probe_does_not_refuse_a_later_newcomer() -> None:
    machine = coordinator()
    peers = working(machine)
    epoch = machine.groups["g"].epoch
    machine.step(b"twin", hello(rank=1, incarnation=2), 1.0)
    machine.step(b"third", hello(rank=1, incarnation=3), 1.0)
    assert answers(machine.step(peers[1], Heartbeat(epoch, 0, 1), 1.0), b"third") == []
    refused = answers(machine.step(peers[1], Heartbeat(epoch, 0, 2), 1.0), b"third")
    assert refused == [Refused("duplicate_rank", "incarnation", 1, 3, 1, 1)]


def test_of_two_that_claim_one_rank_only_one_becomes_its_member() -> None:
    """A contender was admitted while the member joined again: two peers stood for one rank, and losing it broke."""
    machine = coordinator()
    working(machine)
    machine.step(b"twin", hello(rank=1, incarnation=2), 1.0)
    machine.step(b"again", hello(rank=1, incarnation=1), 1.0)
    group = machine.groups["g"]
    assert group.members[1].peer == b"again"
    assert not group.holds(b"twin")
    machine.gone(b"again", 2.0)
    assert answers(machine.step(b"twin", Heartbeat(3, 0), 2.0), b"twin") == [Rejoin(7)]


def test_the_next_life_on_the_same_connection_takes_the_place_of_the_former() -> None:
    machine = coordinator()
    peers = working(machine)
    effects = machine.step(peers[1], hello(rank=1, incarnation=2), 1.0)
    assert answers(effects, peers[1])[-1] == Prepare(machine.groups["g"].epoch, 1, 1)
    assert any(isinstance(message, Suspended) for message in answers(effects, peers[0]))


def test_one_peer_speaks_for_one_rank_of_one_group() -> None:
    machine = coordinator()
    working(machine)
    second = answers(machine.step(b"g0", hello(rank=1), 1.0), b"g0")
    assert second == [Refused("duplicate", "rank", 1, 1, 0, 0)]
    other = answers(machine.step(b"g0", hello("h"), 1.0), b"g0")
    assert other == [Refused("duplicate", "group", 0, "h", -1, "g")]
    assert machine.groups["g"].state is GroupState.ACTIVE
    assert list(machine.groups) == ["g"]


def test_limits_are_answered() -> None:
    machine = coordinator(groups_max=1, ranks_max=4)
    machine.step(b"p", hello("one"), 0.0)
    assert answers(machine.step(b"q", hello("two"), 0.0), b"q") == [
        Refused("limit", "groups_max", 0, "two", -1, 1),
    ]
    machine = coordinator(groups_max=1, ranks_max=4)
    assert answers(machine.step(b"q", hello("two", size=5), 0.0), b"q") == [
        Refused("limit", "world_size", 0, 5, -1, 4),
    ]
    assert machine.groups == {}


def test_a_refused_hello_makes_no_group() -> None:
    machine = coordinator()
    machine.step(b"p", hello(rank=2), 0.0)
    machine.step(b"p", Hello(PROTOCOL_VERSION + 1, "g", 0, 1, 1, 1, 0, {}), 0.0)
    assert machine.groups == {}
    assert machine.deadline() is None


def test_bytes_that_are_no_message_are_counted_and_the_rest_is_unharmed() -> None:
    machine = coordinator()
    working(machine)
    assert machine.malformed(b"g0", FrameMalformed("truncated", 1)) == []
    assert machine.malformed(b"x", FrameOversized("too long", 9)) == []
    told = answers(machine.malformed(b"x", FrameVersionMismatch("protocol version 9, spoken here is 1", 9)), b"x")
    assert told == [
        Refused("version", "protocol_version", -1, "protocol version 9, spoken here is 1", -1, PROTOCOL_VERSION)
    ]
    assert machine.ignored == {"malformed": 1, "oversized": 1, "version": 1}
    assert machine.groups["g"].state is GroupState.ACTIVE


def test_a_frame_with_another_number_of_pools_loses_its_sender_and_harms_nobody_else() -> None:
    machine = coordinator()
    peers = working(machine)
    group = machine.groups["g"]
    machine.step(peers[0], Frame(group.epoch, 0, [], [], [8], 0), 1.0)
    effects = machine.step(peers[1], Frame(group.epoch, 0, [], [], [8, 8], 0), 1.0)
    assert sorted(group.members) == [0]
    assert "2 pools" in group.cause
    assert any(isinstance(message, Suspended) for message in answers(effects, peers[0]))


def test_a_lost_activation_is_repeated_for_an_accept_and_not_after_a_heartbeat() -> None:
    machine = coordinator()
    peers = working(machine)
    epoch = machine.groups["g"].epoch
    assert len(answers(machine.step(peers[0], accept(epoch), 1.0), peers[0])) == 1
    assert answers(machine.step(peers[0], Heartbeat(epoch, 0), 1.0), peers[0]) == [Alive(epoch, 7, 0)]
    assert answers(machine.step(peers[0], accept(epoch), 1.0), peers[0]) == []


def test_an_incarnation_has_to_fit_an_epoch() -> None:
    for incarnation in (0, -1, 1 << 40):
        with pytest.raises(UsageError):
            CoordinatorMachine(incarnation, GroupLimits())
