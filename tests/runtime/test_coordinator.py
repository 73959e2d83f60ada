import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from kvcoord.config import Limits, Timeouts
from kvcoord.domain import Outcome, Reason
from kvcoord.errors import ConfigError
from kvcoord.observability.snapshot import CoordinatorSnapshot, Snapshot
from kvcoord.protocol.codec import encode
from kvcoord.protocol.effects import DivergenceSeen, GroupSuspended, JoinFailed, VerdictReady
from kvcoord.protocol.messages import Decision, Frame, Heartbeat, StatusRequest
from kvcoord.protocol.rank import RankLimits
from tests.runtime.places import SCHEMES, Place
from tests.runtime.rank_shell import RankShell


@pytest.fixture(params=SCHEMES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(request.param, tmp_path, stack)


async def test_all_ranks_get_the_same_decision(place: Place) -> None:
    await place.coordinator()
    ranks = await place.ranks(2)
    for rank in ranks:
        rank.vote("write/1")
    entries = [(await rank.applied("write/1")).entry for rank in ranks]
    assert entries[0] == entries[1] == Decision("write/1", Outcome.COMMIT, sequence=1)


async def test_a_no_aborts_on_every_rank_and_names_who_said_it(place: Place) -> None:
    await place.coordinator()
    ranks = await place.ranks(2)
    ranks[1].vote("write/1", yes=False)
    for rank in ranks:
        entry = (await rank.applied("write/1")).entry
        assert isinstance(entry, Decision)
        assert (entry.outcome, entry.reason, entry.rank, entry.shortfall) == (
            Outcome.ABORT,
            Reason.HOST_FULL,
            1,
            {"kv": 3},
        )


async def test_a_vote_that_never_comes_is_an_abort_after_the_vote_timeout(place: Place) -> None:
    await place.coordinator(timeouts=Timeouts(vote_timeout_s=0.05))
    ranks = await place.ranks(2)
    ranks[0].vote("write/1")
    entry = (await ranks[1].applied("write/1")).entry
    assert (entry.reason, entry.rank) == (Reason.VOTE_TIMEOUT, 1)


async def test_a_round_closes_with_one_verdict_for_all(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2, lockstep=True)
    ranks[0].frame(0, free=[4, 9])
    ranks[1].frame(0, free=[8, 3])
    for rank in ranks:
        await rank.until(lambda rank=rank: VerdictReady(0) in rank.effects)  # type: ignore[misc]
    [group] = coordinator.snapshot().groups
    assert (group.round, group.rounds_closed) == (0, 1)
    assert group.free_pages == {"device.kv": 4, "host.kv": 3}
    assert group.round_close is not None
    assert sum(group.round_close.counts) == 1


async def test_different_digests_are_told_with_round_and_sides(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(3, lockstep=True)
    for rank, digest in zip(ranks, (5, 6, 5), strict=True):
        rank.frame(0, digest=digest)
    for rank in ranks:
        await rank.until(lambda rank=rank: any(isinstance(effect, DivergenceSeen) for effect in rank.effects))  # type: ignore[misc]
        [seen] = [effect for effect in rank.effects if isinstance(effect, DivergenceSeen)]
        assert (seen.round, seen.sides) == (0, [[0, 2], [1]])
    assert coordinator.snapshot().groups[0].divergences == 1
    assert "divergence" in [entry.kind for entry in coordinator.recorder.entries()]


async def test_ranks_of_one_group_may_come_through_different_listeners(place: Place) -> None:
    coordinator = await place.coordinator(place.address, place.other_address)
    assert len(coordinator.addresses) == 2
    first, second = await place.rank(0, 2), await place.rank(1, 2, place.other_address)
    for rank in (first, second):
        await rank.active()
        rank.vote("write/1")
    assert await first.applied("write/1") == await second.applied("write/1")


async def test_a_rank_that_is_silent_is_lost_and_the_others_are_told(place: Place) -> None:
    coordinator = await place.coordinator(timeouts=Timeouts(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.1))
    patient = RankLimits(heartbeat_interval_s=0.02)
    silent = RankLimits(heartbeat_interval_s=60.0, heartbeat_timeout_s=120.0)
    ranks = [await place.rank(0, 2, limits=patient), await place.rank(1, 2, limits=silent)]

    def lost() -> list[object]:
        return [entry.detail for entry in coordinator.recorder.entries() if entry.kind == "member_lost"]

    def told() -> bool:
        """A machine that stands still makes the other one silent too: that one is told when it joins again."""
        suspended = any(effect.rank == 1 for effect in _suspensions(ranks[0]))
        return suspended or ranks[0].machine.cause == "waiting for ranks 1"

    await ranks[0].until(lambda: told() and "'rank': 1" in str(lost()))
    assert coordinator.snapshot().groups[0].ranks_lost >= 1


async def test_a_killed_rank_is_noticed_at_the_next_word_to_it(place: Place) -> None:
    coordinator = await place.coordinator()
    survivor, killed = await place.ranks(2)
    await killed.kill()
    for number in itertools.count():
        survivor.vote(f"word/{number}", yes=False)
        await survivor.until(lambda: bool(_suspensions(survivor)) or survivor.has_applied(f"word/{number}"))  # noqa: B023
        if _suspensions(survivor):
            break
    assert [effect.rank for effect in _suspensions(survivor)] == [1]
    [group] = coordinator.snapshot().groups
    assert not group.ready
    assert "waiting for ranks 1 of 2" in group.reason
    assert group.ranks_lost == 1
    assert [rank.state for rank in group.ranks] == ["waiting", "missing"]


async def test_a_rank_that_leaves_is_told_to_the_others_and_does_not_count_as_lost(place: Place) -> None:
    coordinator = await place.coordinator()
    stays, leaves = await place.ranks(2)
    await leaves.leave()
    await stays.until(lambda: bool(_suspensions(stays)))
    assert "left" in _suspensions(stays)[0].cause
    assert coordinator.snapshot().groups[0].ranks_lost == 0
    assert "member_left" in [entry.kind for entry in coordinator.recorder.entries()]


async def test_a_rank_with_other_settings_is_refused_and_counted(place: Place) -> None:
    coordinator = await place.coordinator()
    await place.ranks(1, fingerprint={"pools": "kv", "page_tokens": 64})
    other = await place.rank(0, 2, fingerprint={"pools": "kv", "page_tokens": 32})
    await other.until(lambda: any(isinstance(effect, JoinFailed) for effect in other.effects))
    assert sum(coordinator.snapshot().joins_refused.values()) >= 1


BAD_FRAMES = {
    "empty": b"",
    "one byte": b"\x01",
    "unknown kind": b"\x01\x91\x63",
    "not msgpack": b"\x01\xc1\xc1\xc1",
    "truncated": encode(Frame(1, 0, [], [], [8, 9], 0))[:-2],
    "wrong type": b"\x01\x94\x03\xa1x\x00\x00",
    "negative round": encode(Frame(1, -1, [], [], [8, 9], 0)),
    "deep": b"\x01" + b"\x91" * 5000,
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_frame_that_is_no_message_is_counted_and_harms_nobody(place: Place, name: str) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2)
    ranks[0].send(BAD_FRAMES[name])
    for rank in ranks:
        rank.vote("write/1")
    for rank in ranks:
        await rank.applied("write/1")
    assert coordinator.snapshot().ignored == {"malformed": 1}
    assert coordinator.snapshot().groups[0].ready


async def test_a_frame_of_an_older_protocol_is_refused_and_told_which_is_spoken(place: Place) -> None:
    coordinator = await place.coordinator()
    await place.ranks(2)
    old = await place.rank(0, 2, group="old")
    old.send(b"\x00" + encode(Heartbeat(1, 0))[1:])
    await old.until(lambda: any(isinstance(effect, JoinFailed) for effect in old.effects))
    [refused] = [effect for effect in old.effects if isinstance(effect, JoinFailed)]
    assert (refused.reason, refused.field) == ("version", "protocol_version")
    assert coordinator.snapshot().ignored == {"version": 1}
    assert coordinator.snapshot().joins_refused == {"version": 1}
    assert coordinator.snapshot().groups[0].ready


async def test_an_oversized_frame_is_counted_and_not_decoded(place: Place) -> None:
    coordinator = await place.coordinator(limits=Limits(message_bytes_max=4096))
    ranks = await place.ranks(2)
    ranks[0].send(b"\x01" + bytes(8000))
    for rank in ranks:
        rank.vote("write/1")
    for rank in ranks:
        await rank.applied("write/1")
    assert coordinator.snapshot().ignored == {"oversized": 1}


async def test_random_bytes_harm_nobody(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2)
    rng = random.Random(7)
    stranger = await place.rank(0, 1, group="stranger")
    real = [encode(Heartbeat(1, 0)), encode(Frame(1, 0, [], [], [8, 9], 0)), encode(StatusRequest(1))]
    for _ in range(500):
        frame = bytearray(rng.choice([rng.randbytes(rng.randrange(64)), *real]))
        for _ in range(rng.randrange(4) if frame else 0):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        stranger.send(bytes(frame))
    for rank in ranks:
        rank.vote("write/1")
    for rank in ranks:
        await rank.applied("write/1")
    assert not coordinator.failure.done()


async def test_anybody_may_ask_for_the_status_while_a_group_works(place: Place) -> None:
    coordinator = await place.coordinator()
    ranks = await place.ranks(2)
    visitor = await place.rank(5, 9, group="visitor")
    visitor.say(StatusRequest(77))
    ranks[0].vote("write/1", yes=False)
    await ranks[1].applied("write/1")
    await visitor.until(lambda: bool(visitor.statuses))
    [reply] = visitor.statuses
    assert reply.nonce == 77
    shown = msgspec.json.decode(reply.body, type=Snapshot)
    assert isinstance(shown, CoordinatorSnapshot)
    assert shown.incarnation == f"{coordinator.incarnation:010x}"
    assert [group.name for group in shown.groups] == ["g", "visitor"]
    assert [rank.state for rank in shown.groups[0].ranks] == ["active", "active"]
    assert shown.received["Hello"] >= 3


async def test_a_status_of_very_many_ranks_is_cut_to_fit_one_message(place: Place) -> None:
    await place.coordinator(limits=Limits(message_bytes_max=4096))
    visitor = await place.rank(0, 200)
    visitor.say(StatusRequest(1))
    await visitor.until(lambda: bool(visitor.statuses))
    shown = msgspec.json.decode(visitor.statuses[0].body, type=CoordinatorSnapshot)
    assert (shown.groups[0].world_size, shown.groups[0].ranks) == (200, [])


async def test_a_second_coordinator_at_the_address_is_refused(place: Place) -> None:
    await place.coordinator()
    with pytest.raises(ConfigError, match="already in use"):
        await place.coordinator()


async def test_a_coordinator_that_cannot_open_everything_leaves_nothing_open(place: Place) -> None:
    await place.coordinator(place.other_address)
    with pytest.raises(ConfigError, match="already in use"):
        await place.coordinator(place.address, place.other_address)
    await place.coordinator(place.address)


async def test_a_closed_coordinator_is_replaced_and_the_group_goes_on(place: Place) -> None:
    first = await place.coordinator()
    quick = RankLimits(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.2)
    ranks = await place.ranks(2, limits=quick)
    await first.close()
    second = await place.coordinator()
    await ranks[0].until(lambda: ranks[0].machine.active and second.snapshot().ready and bool(second.machine.groups))
    for rank in ranks:
        await rank.until(lambda rank=rank: rank.machine.active)  # type: ignore[misc]
        rank.vote("write/2")
    for rank in ranks:
        await rank.applied("write/2")


def _suspensions(rank: RankShell) -> list[GroupSuspended]:
    return [effect for effect in rank.effects if isinstance(effect, GroupSuspended)]
